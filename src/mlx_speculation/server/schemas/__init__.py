"""JSON schemas, compiled in child processes that can be killed.

    template_process   the program of the template: reads the tokenizer once, then forks
                       a child for each schema
    template           starts the template process, and ends its children
    compilers          number of children, their limits, and errors for clients
    constraint         a `Constraint` whose masks a child computes
    tool_calls         the grammar of a tool call that a client asks for
    after_thinking     a constraint that begins after the thinking, and a budget for it

A schema of 1 KB can take its compiler any amount of time and memory. In a child process
both have a limit, after which the child is killed. The engine waits for single masks
only.
"""

from mlx_speculation.server.schemas.after_thinking import AfterThinking
from mlx_speculation.server.schemas.compilers import SchemaCompilers
from mlx_speculation.server.schemas.constraint import SchemaConstraint
from mlx_speculation.server.schemas.tool_calls import call_grammar

__all__ = ["AfterThinking", "SchemaCompilers", "SchemaConstraint", "call_grammar"]

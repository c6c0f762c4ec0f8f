"""JSON schemas, compiled and asked for masks in processes that can be killed.

    template_process   the program: reads the tokenizer once, forks a child per schema
    template           starts that program, and ends its children
    compilers          who may have a child, within which limits, and what went wrong
    constraint         one child as a `Constraint`
    tool_calls         the grammar of a tool call that a client asks for
    after_thinking     a constraint that begins where thinking ends, and its budget

A schema of 1 KB can cost its compiler any time and memory. Here that is the time and
memory of a child, which its limits end; the engine waits for masks alone, and not long.
"""

from mlx_speculation.server.schemas.after_thinking import AfterThinking
from mlx_speculation.server.schemas.compilers import SchemaCompilers
from mlx_speculation.server.schemas.constraint import SchemaConstraint
from mlx_speculation.server.schemas.tool_calls import call_grammar

__all__ = ["AfterThinking", "SchemaCompilers", "SchemaConstraint", "call_grammar"]

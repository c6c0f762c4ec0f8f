"""JSON schemas, compiled in child processes that can be killed.

    template_process   the program of the template process, which reads the tokenizer
                       once, then forks a child for each schema
    compilers          starts the template process, forks and ends its children, limits
                       their number and resources, and makes errors for clients
    constraint         a `Constraint` whose masks a child computes
    tool_calls         the grammar of a tool call that a request forces
    after_thinking     a constraint that begins after the thinking, and a budget for the
                       thinking

Compiling a schema of 1 KB can take any amount of time and memory. A child process has
limits for both. The engine waits for single masks, never for a compilation.
"""

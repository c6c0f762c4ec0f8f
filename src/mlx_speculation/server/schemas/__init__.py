"""JSON schemas, compiled in child processes that can be killed.

    template_process   the program of the process that reads the tokenizer once, then
                       forks a child for each schema
    compilers          starts, limits and ends these processes; turns their errors into
                       those of the API
    constraint         the constraint of a schema, whose masks a child computes; a
                       constraint that begins after the thinking; the grammar of a
                       required tool call

Compiling a schema of 1 KB can take any amount of time and memory. The engine waits for
single masks, never for a compilation.
"""

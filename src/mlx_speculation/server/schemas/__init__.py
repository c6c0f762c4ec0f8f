"""JSON schemas, compiled in child processes that can be killed.

    template_process   the program of the template process, which reads the tokenizer
                       once, then forks a child for each schema
    compilers          starts and ends processes within limits, and makes their errors
    constraint         constraints: of a schema whose masks a child computes, and after
                       the thinking; the grammar of forced calls

Compiling a schema of 1 KB can take any amount of time and memory. The engine waits for
single masks, never for a compilation.
"""

"""Parts of the benchmarks.

    options     the options of the command lines, and the bundled models by name
    report      runs a benchmark: selects the BLAS, prints a table and a line of JSON
    prompts     bundled prompts, and question files in Spec-Bench's layout
    models      a target, and its drafts by name
    arms        ways to decode one prompt, token by token
    turns       runs arms in turns, and takes the ratios of their times
    series      results of each arm over all prompts
    forwards    steady-state times of forwards
    servers     our server and mlx-lm's, and their clients
    replays     draft length policies and lookups on recorded texts, without a model

`options`, `report`, `turns` and `prompts` import no mlx, so a script can choose the
BLAS before mlx is imported.
"""

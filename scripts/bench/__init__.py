"""Parts of the benchmarks: options, prompts, models, arms by turns, reports.

    options     the options of the command lines, and the bundled models by name
    report      runs a benchmark: the BLAS first; one table and one line of JSON at last
    turns       arms by turns, and ratios of their times
    prompts     bundled prompts, and question files in Spec-Bench's layout
    models      a target, and what drafts for it by name
    arms        ways to decode one prompt, token by token
    series      what each arm did with all prompts: speed, acceptance, texts compared
    forwards    steady-state times of forwards, and how many there are
    servers     servers of ours and mlx-lm's, and their clients
    traces      a program: records what is right of drafts, for replays of draft lengths

`options`, `report`, `turns` and `prompts` import no mlx, so that a script can choose
the BLAS before it imports the others.
"""

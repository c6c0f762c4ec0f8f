"""From a chat to token ids: chat templates, and what each of them cannot say.

    traits          probes of a template: which roles, tools and arguments it knows
    fitted          messages fitted to these traits
    rendering       token ids, in what the answer begins, and the marks within it

HTTP and the APIs are not known here, nor what a request asks for beside its chat.
"""

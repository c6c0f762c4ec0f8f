"""From a chat to token ids: chat templates, and messages fitted to each of them.

    traits          probes of a template: roles, tools and arguments that it supports
    fitted          messages fitted to these traits
    rendering       token ids, the state in which the answer begins, and its marks

HTTP, the APIs and all of a request but its chat are not known here.
"""

"""From a chat to token ids: chat templates, and messages fitted to each of them.

    traits          probes of a template: roles, tools and arguments that it supports
    fitted          messages fitted to these traits
    rendering       token ids, the state in which the answer begins, and its marks

These modules do not depend on HTTP or the APIs. Of a request they use only the chat.
"""

"""From a chat to token ids: chat templates, and messages fitted to each of them.

    fitted          messages fitted to what a template supports, which probes find out
    rendering       token ids, the state in which the answer begins, and its marks

These modules do not depend on HTTP or the APIs. Of a request they use only the chat.
"""

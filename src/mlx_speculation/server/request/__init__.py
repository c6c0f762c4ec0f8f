"""From the bytes of an HTTP request to a checked request.

Every field is checked here once, and refused with an error object of OpenAI's
interface. Connections, threads and models are not known here.
"""

"""Everything with I/O that serving needs: one folder per concern, each with a sentence on what lives there and what does not.

An edge reads, calls the core and performs; which endpoint a request gets is decided in the core. What can be said without a socket, a file or a clock
belongs to the core. `app` joins the folders; they know of one another only what their interfaces say.
"""

"""`mmqc serve`: transformers' OpenAI server around one model of mmqc's.

    bytes ─► gate.py ─► requests.py, images.py ─► transformers' handlers ─► generation.py ─► compiled_loop
             token,     what the body asks for,   templates, tools,         one thread, seeds,
             limits,    checked; images opened    streams, answers          who left is not answered
             log line

server.py puts them together; peer.py is where transformers' server is looked up.
"""

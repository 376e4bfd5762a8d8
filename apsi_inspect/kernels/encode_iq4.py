from ._jit import kernel
@kernel
def encode_iq4_nl(x, raw, b0, b1):
    pass

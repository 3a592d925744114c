"""How gradients wait for the global norm when the update happens inside backward.

| policy     | what waits                                        | the standard step  | costs                       |
|------------|---------------------------------------------------|--------------------|-----------------------------|
| `hold`     | the gradient, on the device                       | equal, bitwise     | memory of the gradients     |
| `cpu`      | the gradient, in host memory beyond the watermark | equal, bitwise     | the bus, overlapped         |
| `alias`    | the gradient, in the working weight's storage     | equal, bitwise     | needs fp32 master weights   |
| `factored` | inputs and output gradients of layers, if smaller | equal, to rounding | one process; a little time  |
| `two_pass` | nothing                                           | equal, bitwise     | one more backward           |
| `auto`     | what costs least for device, model and tokens     |                    |                             |

Held gradients cost nothing up to the memory in use when backward begins, since activations are freed meanwhile: the
peak is the larger of the two, not their sum. So all this lowers the peak only where gradients make it: with activation
checkpointing, or with a large model and few tokens.
"""

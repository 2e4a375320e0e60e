"""Files of TensorFlow and Protocol Buffers, read and written without them."""

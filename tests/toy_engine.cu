// toy_engine.cu: each channel times a number, which is a convolution with a 1x1 filter that sees one channel.

struct ToyArguments {
  long_t elements;  // of x, and of y
  long_t plane;     // pixels of an image
  long_t channels;
};

KERNEL LAUNCH_BOUNDS(THREADS, 1) void toy_engine(
    GLOBAL_MEM const data_t* x, GLOBAL_MEM const data_t* w, GLOBAL_MEM data_t* y, const struct ToyArguments args) {
  const index_t i = (index_t)GID_0 * THREADS + LID_0;
  if (i < args.elements) STORE(y, i, LOAD(x, i) * LOAD(w, i / args.plane % args.channels));
}

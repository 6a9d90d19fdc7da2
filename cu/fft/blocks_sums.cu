// blocks_sums.cu: the results that blocks_results.cu has listed: each is the transform's if that is right, or else the sum of its products.
//
// A transform has it right if the sum of its products' magnitudes reaches the limit, and the result may not be zero. So zeros come out as zeros.
// What has to do with Inf and NaN is a sum.
//
// Mapping  SUMMANDS threads -> a result: each adds up every SUMMANDS-th piece of the window's rows. Blocks take the list by turns.
// Memory   shared: the threads' sums, which are added in order.
//
// By hand: nvcc -cubin -I cu cu/fft/blocks_sums.cu
#include "core/portable.cuh"
#include "fft/blocks.cuh"

KERNEL LAUNCH_BOUNDS(THREADS, 1) void fft_blocks_sums(const GLOBAL_MEM data_t* RESTRICT x, const GLOBAL_MEM data_t* RESTRICT w,
                                                             const GLOBAL_MEM data_t* RESTRICT bias, const GLOBAL_MEM data_t* RESTRICT scale,
                                                             const GLOBAL_MEM data_t* residual, GLOBAL_MEM data_t* y, const GLOBAL_MEM wide_t* list,
                                                             const BlocksArguments arg) {
  AFTER_LAST_LAUNCH
  LOCAL_MEM Sum sums[THREADS];
  const int listed = ((const GLOBAL_MEM int*)(list + arg.count_at))[0], count = SMALLER(listed, (int)arg.most);
  const int share = LID_0 % SUMMANDS, at_once = THREADS / SUMMANDS, plane = (int)arg.p * (int)arg.q, size = plane * (int)arg.o;
  EPILOGUE_FLAGS
  for (int first = (int)GID_0 * at_once; first < count; first += (int)arg.sums_grid * at_once) {
    const int number = first + LID_0 / SUMMANDS, there = number < count;
    double value = 0, enough = 0;
    index_t to = 0;
    int channel = 0;
    if (there) {
      const GLOBAL_MEM wide_t* entry = list + arg.list_at + number * (long_t)ENTRY;
      value = entry[0];
      const double limit = entry[1];
      to = (index_t)((const GLOBAL_MEM long_t*)entry)[2];
      const int in_channels = (int)(to / size), pixel = (int)(to - in_channels * (index_t)size), image = in_channels / (int)arg.k;
      channel = in_channels - image * (int)arg.k;
      const int group = channel / (int)arg.per_group, z = pixel / plane, row = (pixel - z * plane) / (int)arg.q, column = pixel - z * plane - row * (int)arg.q;
      const GLOBAL_MEM data_t* from = x + (image * (index_t)arg.image_stride + group * (index_t)arg.group_stride);
      const GLOBAL_MEM data_t* filter = w + (group * (index_t)arg.f_group + (channel - group * (int)arg.per_group) * (index_t)arg.f_written);
      enough = MAY_BE_ZERO(value, limit) ? NO_NUMBER : limit;
      sums[LID_0] = share_of_sum(from, filter, &arg, (int)arg.first_d + z, (int)arg.first_h + row, (int)arg.first_w + column, share, enough);
    }
    local_barrier();
    if (there && share == 0) {
      double total = 0, magnitude = 0;
      int reached = 0;
      for (int i = 0; i < SUMMANDS; ++i) {
        total += sums[LID_0 + i].total;
        magnitude += sums[LID_0 + i].magnitude;
        reached |= sums[LID_0 + i].magnitude >= enough;
      }
      const int right = reached || magnitude >= enough;
      acc_t finished = (acc_t)(right ? value : total);
      const acc_t factor = SCALE_OF(channel), summand = BIAS_OF(channel);
      FINISH(finished, factor, summand, RESIDUAL_AT(to))
      ACTIVATE(&finished, 1)
      STORE(y, to, finished);
    }
    local_barrier();
  }
}

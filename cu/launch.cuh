// launch.cuh: how a launch follows the one before it in its stream: Hopper's programmatic dependent launch, elsewhere nothing.
//
// AFTER_LAST_LAUNCH     in every kernel, before it touches memory: wait until all that the launch before wrote is there. As every
//                       kernel waits so, what is there then is what all launches before wrote.
// NEXT_LAUNCH_MAY_COME  the next launch's blocks may come to the multiprocessors as this one's last blocks leave them. For kernels of
//                       short blocks only: behind a long one, the next launch's blocks would all gather on the few multiprocessors
//                       that it leaves free, and stay there (the sum of a split product took 25 us longer so).
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define AFTER_LAST_LAUNCH asm volatile("griddepcontrol.wait;" ::: "memory");
#define NEXT_LAUNCH_MAY_COME asm volatile("griddepcontrol.launch_dependents;");
#else
#define AFTER_LAST_LAUNCH
#define NEXT_LAUNCH_MAY_COME
#endif

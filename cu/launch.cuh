// launch.cuh: how a launch follows the one before it in its stream: Hopper's programmatic dependent launch, elsewhere nothing.
//
// AFTER_LAST_LAUNCH     in every kernel, before it touches memory: wait until all that the launch before wrote is there. As every
//                       kernel waits so, what is there then is what all launches before wrote.
// NEXT_LAUNCH_MAY_COME  the next launch's blocks may come to the multiprocessors as this one's last blocks leave them. For kernels of
//                       short blocks, or before such as mostly have nothing to do: a split product with the launch that adds its parts
//                       took 25 us longer so, it seems because the latter's blocks all gathered on the few multiprocessors that the
//                       product leaves free.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define AFTER_LAST_LAUNCH asm volatile("griddepcontrol.wait;" ::: "memory");
#define NEXT_LAUNCH_MAY_COME asm volatile("griddepcontrol.launch_dependents;");
#else
#define AFTER_LAST_LAUNCH
#define NEXT_LAUNCH_MAY_COME
#endif

// launch.cuh: how a launch follows the one before it in its stream: Hopper's programmatic dependent launch, elsewhere nothing.
//
// AFTER_LAST_LAUNCH     waits until everything that the launch before wrote is there. It stands in every kernel, before it touches memory. As
//                       every kernel waits so, everything that all launches before wrote is there then.
// NEXT_LAUNCH_MAY_COME  lets the next launch's blocks come to the multiprocessors as this one's last blocks leave them. It is for kernels of
//                       short blocks, and for launches that mostly have nothing to do. A split product and the launch that adds its parts took
//                       25 us longer with it; it seems that the latter's blocks all gathered on the few multiprocessors that were free.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define AFTER_LAST_LAUNCH asm volatile("griddepcontrol.wait;" ::: "memory");
#define NEXT_LAUNCH_MAY_COME asm volatile("griddepcontrol.launch_dependents;");
#else
#define AFTER_LAST_LAUNCH
#define NEXT_LAUNCH_MAY_COME
#endif

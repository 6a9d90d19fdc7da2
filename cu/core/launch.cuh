// launch.cuh: how a launch follows the one before it in its stream: Hopper's programmatic dependent launch, elsewhere nothing.
//
// AFTER_LAST_LAUNCH     waits until all writes of the launch before are visible. It stands in every kernel before the first access to memory. Since
//                       every kernel waits so, all earlier launches' writes are visible then, too. In a text with NEXT_COMES, the next launch's blocks
//                       may start then.
// READS_EARLIER         stands in a kernel that reads, before it waits so, what only launches before the last one wrote; it still has to wait before it ends.
//                       The last one has to be of ours, since that waited for the others.
// NEXT_LAUNCH_MAY_COME  lets the next launch's blocks start as this launch's last blocks leave the multiprocessors. It is for kernels of
//                       short blocks, and for launches that mostly have nothing to do. It made a split product with the launch that adds its parts
//                       25 us slower, apparently because the second launch's blocks all gathered on the few multiprocessors that were free.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define NEXT_LAUNCH_MAY_COME asm volatile("griddepcontrol.launch_dependents;");
#define READS_EARLIER asm volatile("// reads what earlier launches wrote");
#ifdef NEXT_COMES
#define AFTER_LAST_LAUNCH asm volatile("griddepcontrol.wait;" ::: "memory"); NEXT_LAUNCH_MAY_COME
#else
#define AFTER_LAST_LAUNCH asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
#else
#define AFTER_LAST_LAUNCH
#define NEXT_LAUNCH_MAY_COME
#define READS_EARLIER
#endif

// turns.c: who has the interpreter's lock (the GIL) while the driver launches.
#include <time.h>
#include "launch.h"

#if defined(_MSC_VER)
#include <intrin.h>
typedef volatile long Flag;
#define SET(flag, value) _InterlockedExchange(flag, value)
#define TAKE(flag) (_InterlockedCompareExchange(flag, 1, 0) == 0)
#define ADD(flag, value) _InterlockedExchangeAdd(flag, value)
#define PAUSE() _ReadWriteBarrier()
typedef volatile int64_t Number;
#define GET(number) (number)
#define PUT(number, value) ((number) = (value))
#define THREAD_LOCAL __declspec(thread)
#else
typedef int Flag;
typedef int64_t Number;
#define GET(number) __atomic_load_n(&(number), __ATOMIC_RELAXED)
#define PUT(number, value) __atomic_store_n(&(number), value, __ATOMIC_RELAXED)
#define THREAD_LOCAL __thread
#define SET(flag, value) __atomic_store_n(flag, value, __ATOMIC_RELEASE)
#define TAKE(flag) (__atomic_load_n(flag, __ATOMIC_RELAXED) == 0 && __atomic_exchange_n(flag, 1, __ATOMIC_ACQUIRE) == 0)
#define ADD(flag, value) __atomic_fetch_add(flag, value, __ATOMIC_RELAXED)
#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() __atomic_signal_fence(__ATOMIC_SEQ_CST)
#endif
#endif

// Threads take turns. To hand over the GIL at each call takes longer than a launch: the next thread sleeps and has to be woken, and the objects
// move to its core. So for a turn one thread takes the GIL back after each of its launches. The other threads, back from their launches, wait
// without the GIL. One of them is awake and has the next turn; the rest sleep for `next_turn`. A waiting thread holds that lock, but never while
// the driver is called. Every wait ends by the clock, so no signal can be missed: when the turn is over, when its thread has not been back from
// a launch for a while, or when that thread waits for the driver.
//
// A thread may also release the GIL elsewhere in its turn. One does while it waits for torch's engine, which launches a backward pass from
// another thread. A thread that has the GIL then takes the turn at once if no other thread waits for it.
enum {
  TURN_NS = 200000,   // length of a turn, while others wait
  AWAY_NS = 20000,    // a thread that was not back from a launch for so long does something else
  LAUNCH_NS = 10000,  // a longer launch waits for the driver
};

static Flag turn = 1;                 // number of the turn
static Flag on_the_way;               // 0 while a thread that has released the GIL is in a launch; 1 from when it takes the GIL back
static Flag waiting;                  // number of threads that wait for their turn
static int is_back;                   // whether the thread that launched last has had the GIL again; read and written with the GIL
static Flag met;                      // number of times that threads came back from launches in their turns
static Number begun;                  // when the turn began
static THREAD_LOCAL long own_turn;    // the last turn of this thread
static PyThread_type_lock next_turn;  // its holder has the next turn

// Whether threads can take turns, which they can once this was asked. 0 with an exception.
int can_take_turns(void) {
  if (!next_turn && !(next_turn = PyThread_allocate_lock())) PyErr_NoMemory();
  return next_turn != NULL;
}

static int64_t now(void) {
  struct timespec t;
  timespec_get(&t, TIME_UTC);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// Whether the time from `since` to `until` is at most `most`; 0 also where the clock was set back in between.
static int lasts(int64_t since, int64_t until, int64_t most) { return until - since >= 0 && until - since <= most; }

static void take_turn(void) {
  own_turn = ADD(&turn, 1) + 1;
  PUT(begun, now());
}

PyThreadState* let_go(void) {
  if (is_back && GET(turn) != own_turn && !GET(waiting)) take_turn();
  is_back = 0;
  PyThreadState* state = PyEval_SaveThread();
  SET(&on_the_way, 0);
  return state;
}

// Wait until the turn is over, or its thread does something else or waits for the driver.
static void wait_for_turn(void) {
  int64_t t = now(), last = t;
  long before = -1;
  for (;;) {
    const int launching = !GET(on_the_way);
    const long found = 2L * GET(met) + launching;
    if (found != before) before = found, last = t;
    if (launching && !(lasts(GET(begun), t, TURN_NS) && lasts(last, t, LAUNCH_NS)) && TAKE(&on_the_way)) return;
    if (!launching && !lasts(last, t, AWAY_NS)) return;
    for (int i = 0; i < 8; i++) PAUSE();
    t = now();
  }
}

void take_again(PyThreadState* state) {
  if (GET(turn) == own_turn && TAKE(&on_the_way)) {
    ADD(&met, 1);
    PyEval_RestoreThread(state);
  } else {
    ADD(&waiting, 1);
    PyThread_acquire_lock(next_turn, 1);
    wait_for_turn();
    take_turn();
    PyThread_release_lock(next_turn);
    ADD(&waiting, -1);
    PyEval_RestoreThread(state);
    SET(&on_the_way, 1);
  }
  is_back = 1;
}

// A CUDA thread as a fiber: its own stack, and a switch of a dozen instructions. The code reports
// every switch to sanitizers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(__SANITIZE_THREAD__)
#define SIMT_TSAN 1
#define SIMT_UNSEEN __attribute__((no_sanitize("thread"), noinline))
#define SIMT_UNSEEN_CALL __attribute__((no_sanitize("thread")))
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_acquire(void*);
void __tsan_release(void*);
void __tsan_read16(void*);
void __tsan_write16(void*);
}
#else
#define SIMT_TSAN 0
#define SIMT_UNSEEN
#define SIMT_UNSEEN_CALL
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define SIMT_ASAN 1
#else
#define SIMT_ASAN 0
#endif

namespace simt::emulator {

// For the race detector: only barriers, and a block's being the last, order one thread's accesses
// after another's.
inline void happens_before(void* edge) {
#if SIMT_TSAN
  __tsan_release(edge);
#endif
  (void)edge;
}
inline void happens_after(void* edge) {
#if SIMT_TSAN
  __tsan_acquire(edge);
#endif
  (void)edge;
}
inline void reads_16(const void* p) {
#if SIMT_TSAN
  __tsan_read16(const_cast<void*>(p));
#endif
  (void)p;
}
inline void writes_16(void* p) {
#if SIMT_TSAN
  __tsan_write16(p);
#endif
  (void)p;
}

#if defined(__x86_64__)
extern "C" void simt_switch(void** from, void* to);
asm(R"(.text
.type simt_switch,@function
.weak simt_switch
simt_switch:
 pushq %rbp
 pushq %rbx
 pushq %r12
 pushq %r13
 pushq %r14
 pushq %r15
 movq %rsp,(%rdi)
 movq %rsi,%rsp
 popq %r15
 popq %r14
 popq %r13
 popq %r12
 popq %rbx
 popq %rbp
 ret
.size simt_switch,.-simt_switch
)");
#endif

// Stacks of ended threads, kept until the launch ends: until then no order protects their reuse.
inline std::vector<void*>& retired() {
  static std::vector<void*> all;
  return all;
}
inline void free_retired() {
  for (void* memory : retired()) free(memory);
  retired().clear();
}

// A switch target: a fiber, or the scheduler.
struct Context {
  static constexpr size_t kStackBytes = (SIMT_ASAN || SIMT_TSAN) ? 256 * 1024 : 64 * 1024;

  char* stack = nullptr;
  const void* stack_bottom = nullptr;
  size_t stack_bytes = 0;
#if defined(__x86_64__)
  void* sp = nullptr;
#else
  ucontext_t context;
#endif
  void* tsan = nullptr;
  void* fake_stack = nullptr;

  void begin(void (*entry)()) {
#if SIMT_TSAN
    retired().push_back(stack);  // fresh memory for each: stacks of two blocks' threads share no addresses
    stack = nullptr;
#endif
    if (!stack) stack = static_cast<char*>(aligned_alloc(64, kStackBytes));
    stack_bottom = stack;
    stack_bytes = kStackBytes;
#if SIMT_ASAN
    __asan_unpoison_memory_region(stack, kStackBytes);
#endif
#if SIMT_TSAN
    if (tsan) __tsan_destroy_fiber(tsan);
    tsan = __tsan_create_fiber(0);
#endif
#if defined(__x86_64__)
    void** top = reinterpret_cast<void**>(stack + kStackBytes - 64);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    sp = top;
#else
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
#endif
  }
};

// from: the place at which the caller goes on after a switch back; is_last: there is none.
SIMT_UNSEEN inline void switch_to(Context& from, Context& to, bool is_last = false) {
#if SIMT_TSAN
  __tsan_switch_to_fiber(to.tsan, 1);  // 1: no order between the two
#endif
#if SIMT_ASAN
  __sanitizer_start_switch_fiber(is_last ? nullptr : &from.fake_stack, to.stack_bottom, to.stack_bytes);
#endif
  (void)is_last;
#if defined(__x86_64__)
  simt_switch(&from.sp, to.sp);
#else
  swapcontext(&from.context, &to.context);
#endif
#if SIMT_ASAN
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

}  // namespace simt::emulator

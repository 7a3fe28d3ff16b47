#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>

namespace emulator {

#if defined(__x86_64__)
// Saves what the System V ABI calls callee-saved and swaps stacks: a few nanoseconds, where swapcontext makes
// a system call.
extern "C" void emulator_swap_stacks(void** save, void* load);
asm(R"(
.text
.globl emulator_swap_stacks
.hidden emulator_swap_stacks
.type emulator_swap_stacks,@function
emulator_swap_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_swap_stacks,.-emulator_swap_stacks
)");

void Fiber::start(char* stack, size_t bytes, void (*entry)()) {
  // The `ret` above pops `entry`; a function starts with rsp 8 short of a multiple of 16.
  void** top = reinterpret_cast<void**>(stack + bytes) - 2;
  top[0] = reinterpret_cast<void*>(entry);
  top[1] = nullptr;
  constexpr size_t saved = 6;
  memset(top - saved, 0, saved * sizeof(void*));
  stack_pointer = top - saved;
}

void jump(Fiber& from, Fiber& to) { emulator_swap_stacks(&from.stack_pointer, to.stack_pointer); }
#else
void Fiber::start(char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = bytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}

void jump(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }
#endif

namespace {
struct Mapping {
  char* start = nullptr;
  size_t count = 0;
  ~Mapping() {
    if (start) munmap(start, count * STACK_BYTES);
  }
};
}  // namespace

char* stacks(size_t count) {
  static thread_local Mapping mapping;
  if (mapping.count < count) {
    void* start = mmap(nullptr, count * STACK_BYTES, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) throw std::runtime_error("no memory for the stacks of a block");
    if (mapping.start) munmap(mapping.start, mapping.count * STACK_BYTES);
    mapping.start = static_cast<char*>(start);
    mapping.count = count;
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    for (size_t i = 0; i < count; i++) mprotect(mapping.start + i * STACK_BYTES, page, PROT_NONE);
  }
  return mapping.start;
}

}  // namespace emulator

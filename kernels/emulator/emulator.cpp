// Runs blocks, and the C functions by which tests allocate, copy and launch.
#include "emulator.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

namespace emulator {

thread_local Block* block __attribute__((tls_model("initial-exec"))) = nullptr;
Kernel* kernels = nullptr;

namespace {

constexpr size_t MOST_THREADS = 1024;
// What a block may have of shared memory on sm_80, the smallest of the architectures we compile for.
constexpr size_t MOST_SHARED = 163 << 10;

std::string in_words(const Dim3& d) {
  return "(" + std::to_string(d.x) + "," + std::to_string(d.y) + "," + std::to_string(d.z) + ")";
}

std::string site(const Thread& thread) { return std::string(thread.file) + ":" + std::to_string(thread.line); }

// What a fiber runs. Leaves through the scheduler, never by returning.
void run_thread() {
  try {
    block->body(block->body_data);
  } catch (const std::exception& error) {
    block->failure = error.what();
  }
  block->thread().state = State::Done;
  jump(block->thread().fiber, block->scheduler);
  abort();
}

// In which order threads and warps take turns. No result may depend on it.
enum class Order : uint32_t { Forward, Backward };

size_t nth(Order order, size_t i, size_t count) { return order == Order::Forward ? i : count - 1 - i; }

// Frees the lanes of a warp whose barrier is complete; returns whether there were any.
bool release_warp(size_t first, size_t end) {
  bool released = false;
  std::vector<Thread>& threads = block->threads;
  const unsigned present = end - first == WARP ? ~0u : (1u << (end - first)) - 1;
  for (size_t i = first; i < end; i++) {
    if (threads[i].state != State::AtWarpBarrier) continue;
    const unsigned mask = threads[i].mask & present;
    bool complete = true;
    for (size_t j = first; j < end; j++) {
      if (!(mask >> (j - first) & 1)) continue;
      const Thread& other = threads[j];
      if (other.state == State::Done) {
        block->running = i;
        fail("the warp operation at " + site(threads[i]) + " names lane " + std::to_string(j - first) +
             ", which has returned");
      }
      const bool here = other.state == State::AtWarpBarrier && other.mask == threads[i].mask &&
                        other.line == threads[i].line && other.file == threads[i].file;
      complete &= here;
    }
    if (!complete) continue;
    for (size_t j = first; j < end; j++) {
      if (mask >> (j - first) & 1) threads[j].state = State::Ready;
    }
    released = true;
  }
  return released;
}

// Runs a warp until each of its threads is done or at a barrier of the block.
void run_warp(Order order, size_t first, size_t end) {
  std::vector<Thread>& threads = block->threads;
  for (;;) {
    bool ran = false;
    for (size_t n = 0; n < end - first; n++) {
      const size_t i = first + nth(order, n, end - first);
      if (threads[i].state != State::Ready) continue;
      ran = true;
      block->running = i;
      jump(block->scheduler, threads[i].fiber);
      if (!block->failure.empty()) throw std::runtime_error(block->failure);
    }
    if (release_warp(first, end)) continue;
    if (!ran) return;
  }
}

// With every thread stopped: lets a barrier of the block pass if all are at the same one.
void pass_barrier() {
  std::vector<Thread>& threads = block->threads;
  size_t waiting = threads.size(), elsewhere = threads.size();
  for (size_t i = 0; i < threads.size(); i++) {
    (threads[i].state == State::AtBlockBarrier ? waiting : elsewhere) = i;
  }
  if (waiting == threads.size()) {
    block->running = elsewhere;
    fail("deadlock: the warp operation at " + site(threads[elsewhere]) + " waits for lanes that never arrive");
  }
  if (elsewhere != threads.size()) {
    const bool done = threads[elsewhere].state == State::Done;
    const std::string where = done ? "has returned" : "waits in the warp operation at " + site(threads[elsewhere]);
    block->running = waiting;
    fail("divergent barrier: __syncthreads at " + site(threads[waiting]) + ", but thread " +
         std::to_string(elsewhere) + " " + where);
  }
  for (const Thread& thread : threads) {
    if (thread.line != threads[0].line || thread.file != threads[0].file) {
      fail("divergent barrier: __syncthreads at " + site(threads[0]) + " and at " + site(thread));
    }
  }
  for (Thread& thread : threads) thread.state = State::Ready;
  block->block_time++;
}

void run_block(Order order) {
  const size_t count = block->threads.size();
  char* stack = stacks(count);
  for (size_t i = 0; i < count; i++) {
    block->threads[i].state = State::Ready;
    block->threads[i].fiber.start(stack + i * STACK_BYTES, STACK_BYTES, run_thread);
  }
  block->block_time = 0;
  for (uint32_t& time : block->warp_times) time = 0;
  for (SharedArray& array : block->arrays) array.region->forget();
  block->dynamic->forget();
  const size_t warps = (count + WARP - 1) / WARP;
  for (;;) {
    for (size_t n = 0; n < warps; n++) {
      const size_t first = nth(order, n, warps) * WARP;
      run_warp(order, first, std::min(count, first + WARP));
    }
    const auto done = [](const Thread& thread) { return thread.state == State::Done; };
    if (std::all_of(block->threads.begin(), block->threads.end(), done)) return;
    pass_barrier();
  }
}

struct Launch {
  Block block;
  Order order;
};

void run_grid(void (*body)(void*), void* body_data, void* data) {
  Launch& launch = *static_cast<Launch*>(data);
  Block& b = launch.block;
  b.body = body;
  b.body_data = body_data;
  for (unsigned z = 0; z < b.grid.z; z++) {
    for (unsigned y = 0; y < b.grid.y; y++) {
      for (unsigned x = 0; x < b.grid.x; x++, b.number++) {
        b.index = {x, y, z};
        run_block(launch.order);
      }
    }
  }
}

std::mutex regions_lock;
std::map<uint64_t, std::unique_ptr<Region>>& regions() {
  static std::map<uint64_t, std::unique_ptr<Region>> all;
  return all;
}

}  // namespace

Region* region_of(uint64_t address, uint64_t* offset) {
  const std::lock_guard<std::mutex> guard(regions_lock);
  auto after = regions().upper_bound(address);
  if (after == regions().begin()) return nullptr;
  const auto& [start, region] = *--after;
  *offset = address - start;
  return *offset <= region->bytes ? region.get() : nullptr;
}

void fail(const std::string& what) {
  throw std::runtime_error(block->kernel + ", block " + in_words(block->index) + ", thread " +
                           in_words(block->thread().index) + ": " + what);
}

void wait(State state, unsigned mask, const char* file, int line) {
  Thread& me = block->thread();
  if (state == State::AtWarpBarrier && !(mask >> block->lane() & 1)) {
    fail("a warp operation whose mask leaves out the lane that calls it");
  }
  me.state = state;
  me.mask = mask;
  me.file = file;
  me.line = line;
  jump(me.fiber, block->scheduler);
}

Region* shared_array(const void* tag, size_t bytes) {
  for (SharedArray& array : block->arrays) {
    if (array.tag == tag) return array.region.get();
  }
  block->arrays.push_back({tag, std::make_unique<Region>(bytes, 4, true)});
  size_t sum = block->dynamic->bytes;
  for (const SharedArray& array : block->arrays) sum += array.region->bytes;
  if (sum > MOST_SHARED) fail("shared memory of " + std::to_string(sum) + " bytes is more than sm_80 has");
  return block->arrays.back().region.get();
}

}  // namespace emulator

void __syncwarp(unsigned mask, const char* file, int line) {
  emulator::wait(emulator::State::AtWarpBarrier, mask, file, line);
  // The first lane to go on moves the warp's time; all of them passed the same barrier.
  emulator::Block& b = *emulator::block;
  const size_t present = std::min<size_t>(32, b.threads.size() - b.warp() * 32);
  const unsigned lanes = __builtin_popcount(mask & (present == 32 ? ~0u : (1u << present) - 1));
  unsigned& passed = b.passed[b.warp()];
  if (passed++ == 0) b.warp_times[b.warp()]++;
  if (passed == lanes) passed = 0;
}

unsigned __ballot_sync(unsigned mask, int predicate, const char* file, int line) {
  unsigned votes = 0;
  const int mine = predicate != 0;
  uint64_t* slots = &emulator::block->exchange[emulator::block->warp() * 32];
  slots[emulator::block->lane()] = static_cast<uint64_t>(mine);
  emulator::wait(emulator::State::AtWarpBarrier, mask, file, line);
  const unsigned lanes = std::min<size_t>(32, emulator::block->threads.size() - emulator::block->warp() * 32);
  for (unsigned lane = 0; lane < lanes; lane++) {
    if (mask >> lane & 1) votes |= static_cast<unsigned>(slots[lane]) << lane;
  }
  emulator::wait(emulator::State::AtWarpBarrier, mask, file, line);
  return votes;
}

extern "C" {

// `granule`: bytes of an element. `unified`: the host will use the memory too; the address is its own.
uint64_t emulator_allocate(uint64_t bytes, uint64_t granule, uint32_t unified) {
  using namespace emulator;
  try {
    auto region = std::make_unique<Region>(bytes, granule, false);
    region->unified = unified != 0;
    const uint64_t address = reinterpret_cast<uint64_t>(region->data);
    const std::lock_guard<std::mutex> guard(regions_lock);
    regions()[address] = std::move(region);
    return address;
  } catch (const std::exception&) {
    return 0;
  }
}

void emulator_free(uint64_t address) {
  const std::lock_guard<std::mutex> guard(emulator::regions_lock);
  emulator::regions().erase(address);
}

// 0, or -1 where the range is not of a buffer.
int emulator_upload(uint64_t address, const void* from, uint64_t bytes) {
  uint64_t offset = 0;
  emulator::Region* region = emulator::region_of(address, &offset);
  if (!region || offset + bytes > region->bytes) return -1;
  memcpy(region->data + offset, from, bytes);
  for (uint64_t i = offset; i < offset + bytes; i += region->granule) region->written[i / region->granule] = true;
  return 0;
}

int emulator_download(uint64_t address, void* to, uint64_t bytes) {
  uint64_t offset = 0;
  emulator::Region* region = emulator::region_of(address, &offset);
  if (!region || offset + bytes > region->bytes) return -1;
  memcpy(to, region->data + offset, bytes);
  return 0;
}

// 0, or -1 with the reason in `error`.
int emulator_launch(const char* name, const uint32_t* grid, const uint32_t* shape, uint32_t shared_bytes,
                    const emulator::Argument* arguments, uint64_t count, uint32_t order, char* error,
                    uint64_t error_bytes) {
  using namespace emulator;
  static std::atomic<uint32_t> launches{0};
  const auto refuse = [&](const std::string& what) {
    snprintf(error, error_bytes, "%s", what.c_str());
    return -1;
  };
  const Kernel* kernel = kernels;
  while (kernel && std::string(kernel->name) != name) kernel = kernel->next;
  if (!kernel) return refuse(std::string("no kernel ") + name);
  Launch launch;
  Block& b = launch.block;
  launch.order = static_cast<Order>(order);
  b.kernel = name;
  b.grid = {grid[0], grid[1], grid[2]};
  b.shape = {shape[0], shape[1], shape[2]};
  const size_t threads = b.shape.count();
  const bool fits = threads > 0 && threads <= MOST_THREADS && b.grid.count() > 0 && b.grid.y < 65536 &&
                    b.grid.z < 65536 && b.grid.x < 1u << 31 && shared_bytes <= MOST_SHARED;
  if (!fits) {
    return refuse(b.kernel + ": invalid configuration: grid " + in_words(b.grid) + ", block " + in_words(b.shape) +
                  ", " + std::to_string(shared_bytes) + " bytes of shared memory");
  }
  b.threads.resize(threads);
  for (size_t i = 0; i < threads; i++) {
    b.threads[i].index = {static_cast<unsigned>(i % b.shape.x), static_cast<unsigned>(i / b.shape.x % b.shape.y),
                          static_cast<unsigned>(i / b.shape.x / b.shape.y)};
  }
  const size_t warps = (threads + WARP - 1) / WARP;
  b.exchange.resize(warps * WARP);
  b.warp_times.resize(warps);
  b.passed.resize(warps);
  b.launch = ++launches;
  Block* outer = block;
  block = &b;
  int result = 0;
  try {
    b.dynamic = std::make_unique<Region>(shared_bytes, 4, true);
    kernel->run(arguments, count, run_grid, &launch);
  } catch (const std::exception& e) {
    result = refuse(std::string(e.what()).find(b.kernel) == 0 ? e.what() : b.kernel + ": " + e.what());
  }
  block = outer;
  return result;
}

}  // extern "C"

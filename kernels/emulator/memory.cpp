#include "memory.h"

#include <cstdlib>

#include "emulator.h"

namespace emulator {

namespace {
// Large enough for every vector load.
constexpr size_t ALIGNMENT = 256;

std::string place(const Region& region, int parameter) {
  return region.shared ? "shared memory" : "parameter " + std::to_string(parameter);
}

std::string who(const Access& access) {
  return "thread " + std::to_string(access.thread) + " of block " + std::to_string(access.block);
}

// Nothing orders an earlier access of this launch before one that is made now.
bool unordered(const Access& earlier, const Access& now) {
  if (earlier.launch != now.launch) return false;
  if (earlier.block != now.block) return true;
  if (earlier.thread == now.thread || earlier.block_time != now.block_time) return false;
  return earlier.thread / WARP != now.thread / WARP || earlier.warp_time == now.warp_time;
}
}  // namespace

Region::Region(size_t bytes, size_t granule, bool shared) : bytes(bytes), granule(granule), shared(shared) {
  const size_t rounded = (bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT;
  data = static_cast<char*>(std::aligned_alloc(ALIGNMENT, rounded));
  if (!data) throw std::runtime_error("no memory for a buffer of " + std::to_string(bytes) + " bytes");
  cells.resize(bytes / granule + 1);
  written.resize(cells.size());
  forget();
}

Region::~Region() { free(data); }

void Region::forget() {
  memset(data, 0xff, bytes);
  written.assign(written.size(), false);
  // Accesses of an earlier block must not look like this one's.
  if (shared) cells.assign(cells.size(), Cell());
}

bool Region::has_written(size_t index) const {
  if (written[index] || !unified) return written[index];
  const unsigned char* bytes = reinterpret_cast<const unsigned char*>(data) + index * granule;
  for (size_t i = 0; i < granule; i++) {
    if (bytes[i] != 0xff) return true;
  }
  return false;
}

void touch(Region& region, size_t offset, size_t, Use use, int parameter) {
  // Elements lie at multiples of their size and are always accessed as what they are: the first granule will do.
  const size_t index = offset / region.granule;
  Cell& cell = region.cells[index];
  const unsigned running = static_cast<unsigned>(block->running);
  const Access now = {block->launch,     block->number, running, block->block_time, block->warp_times[running / WARP],
                      use == Use::Atomic};
  const auto race = [&](const char* mine, const char* theirs, const Access& other) {
    fail(std::string("race: ") + mine + " byte " + std::to_string(offset) + " of " + place(region, parameter) +
         ", which " + who(other) + " " + theirs + " with no barrier between");
  };
  if (use != Use::Write && !region.has_written(index)) {
    fail("reads byte " + std::to_string(offset) + " of " + place(region, parameter) + ", which nothing has written");
  }
  if (!(now.atomic && cell.write.atomic) && unordered(cell.write, now)) {
    race(use == Use::Read ? "reads" : "writes", "has written", cell.write);
  }
  if (use == Use::Read) {
    // Readers of a warp at one of its times count together; after a __syncwarp they are ordered before what follows.
    const bool together = cell.read.launch == now.launch && cell.read.block == now.block &&
                          cell.read.block_time == now.block_time && cell.read.warp_time == now.warp_time &&
                          cell.read.thread / WARP == now.thread / WARP;
    cell.several_readers = unordered(cell.read, now) || (cell.several_readers && together);
    cell.read = now;
    return;
  }
  if (cell.read.launch == now.launch) {
    const bool same_time = cell.read.block == now.block && cell.read.block_time == now.block_time;
    if (unordered(cell.read, now) || (cell.several_readers && same_time && cell.read.thread == now.thread &&
                                      cell.read.warp_time == now.warp_time)) {
      race("writes", "has read", cell.read);
    }
  }
  cell.write = now;
  region.written[index] = true;
}

void out_of_bounds(const Region& region, ptrdiff_t index, size_t elements, size_t element_bytes, int parameter) {
  fail("out of bounds: element " + std::to_string(index) + " of " + place(region, parameter) + ", which has " +
       std::to_string(elements) + " elements of " + std::to_string(element_bytes) + " bytes");
}

void misaligned(ptrdiff_t index, size_t bytes, int parameter) {
  fail("misaligned: " + std::to_string(bytes) + " bytes at element " + std::to_string(index) + " of parameter " +
       std::to_string(parameter));
}

}  // namespace emulator

// Device memory whose every access is checked: bounds, alignment, races and reads of what nobody wrote.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

namespace emulator {

// Who last touched a place, and when. Times are numbers of barriers passed: of the block, of the warp.
struct Access {
  uint32_t launch = 0, block = 0, thread = 0, block_time = 0, warp_time = 0;
  bool atomic = false;
};

struct Cell {
  Access write, read;
  bool several_readers = false;  // since the last barrier of the block
};

// A device buffer, or an array in the shared memory of the block that runs.
struct Region {
  char* data = nullptr;
  size_t bytes = 0;
  size_t granule = 0;  // bytes a cell stands for: the smallest element
  bool shared = false;
  bool unified = false;  // the host writes there too, unseen
  std::vector<Cell> cells;
  std::vector<bool> written;

  Region(size_t bytes, size_t granule, bool shared);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  // Everything is unwritten again: NaN, where it is read as a float.
  void forget();
  // Whether anyone has written a granule. What the host wrote shows in that it is not as `forget` left it.
  bool has_written(size_t index) const;
};

enum class Use { Read, Write, Atomic };
// Notes an access of `bytes` bytes at `offset`; throws on a race or on a read of what was never written.
void touch(Region& region, size_t offset, size_t bytes, Use use, int parameter);
[[noreturn]] void out_of_bounds(const Region& region, ptrdiff_t index, size_t elements, size_t element_bytes,
                                int parameter);
[[noreturn]] void misaligned(ptrdiff_t index, size_t bytes, int parameter);

// One element. Reading and writing go through here, so they can be told apart.
template <class T>
class Element {
 public:
  Element(Region* region, size_t offset, int parameter) : region(region), offset(offset), parameter(parameter) {}
  Element(const Element&) = default;
  operator T() const {
    touch(*region, offset, sizeof(T), Use::Read, parameter);
    T value;
    memcpy(&value, region->data + offset, sizeof(T));
    return value;
  }
  T operator=(T value) const {
    touch(*region, offset, sizeof(T), Use::Write, parameter);
    memcpy(region->data + offset, &value, sizeof(T));
    return value;
  }
  T operator=(const Element& other) const { return *this = static_cast<T>(other); }
  T operator+=(T value) const { return *this = static_cast<T>(*this) + value; }
  T operator*=(T value) const { return *this = static_cast<T>(*this) * value; }

 private:
  Region* region;
  size_t offset;
  int parameter;
};

// A pointer into a region that knows the part of it that it may reach.
template <class T>
class Pointer {
 public:
  using Value = std::remove_const_t<T>;
  Pointer() = default;
  Pointer(Region* region, size_t offset, size_t elements, int parameter)
      : region(region), start(offset), elements(elements), parameter(parameter) {}
  // A pointer to what may be written serves where only reading is allowed.
  operator Pointer<const T>() const {
    Pointer<const T> other(region, start, elements, parameter);
    return other + shift;
  }
  Pointer operator+(ptrdiff_t by) const {
    Pointer moved = *this;
    moved.shift += by;
    return moved;
  }
  auto operator[](ptrdiff_t index) const {
    Element<Value> element(region, place(index, 1), parameter);
    if constexpr (std::is_const_v<T>) {
      return static_cast<Value>(element);
    } else {
      return element;
    }
  }
  explicit operator bool() const { return region != nullptr; }

  // `count` neighbours at once, which must lie at a multiple of their size.
  template <class Vector>
  Vector load(ptrdiff_t index) const {
    constexpr size_t count = sizeof(Vector) / sizeof(T);
    const size_t offset = place(index, count);
    if (reinterpret_cast<uintptr_t>(region->data + offset) % sizeof(Vector)) {
      misaligned(index, sizeof(Vector), parameter);
    }
    for (size_t i = 0; i < count; i++) touch(*region, offset + i * sizeof(T), sizeof(T), Use::Read, parameter);
    Vector value;
    memcpy(&value, region->data + offset, sizeof(Vector));
    return value;
  }
  Value atomic_add(Value value) const {
    const size_t offset = place(0, 1);
    touch(*region, offset, sizeof(T), Use::Atomic, parameter);
    Value old;
    memcpy(&old, region->data + offset, sizeof(T));
    const Value sum = old + value;
    memcpy(region->data + offset, &sum, sizeof(T));
    return old;
  }

 private:
  size_t place(ptrdiff_t index, size_t count) const {
    const ptrdiff_t at = shift + index;
    if (!region || at < 0 || static_cast<size_t>(at) + count > elements) {
      static const Region nowhere(0, 1, false);
      out_of_bounds(region ? *region : nowhere, at, elements, sizeof(T), parameter);
    }
    return start + static_cast<size_t>(at) * sizeof(T);
  }

  Region* region = nullptr;
  size_t start = 0;     // bytes from the region's start to the first element it may reach
  size_t elements = 0;  // how many it may reach
  ptrdiff_t shift = 0;  // elements it was moved by
  int parameter = -1;   // of the kernel; -1 for shared memory
};

template <class T>
struct is_pointer : std::false_type {};
template <class T>
struct is_pointer<Pointer<T>> : std::true_type {};

}  // namespace emulator

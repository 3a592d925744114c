// Memory for torch's tensors on a CPU: one range of addresses, filled from both ends.
//
// A step makes and frees the same sizes over and over. In a heap that takes the hole that fits best, tensors that live
// long come to lie between others that do not, and a third of what a step holds is lost in holes beside it. Here what
// lives long, told by its size (a gradient, a state of the optimizer: the sizes of parameters), takes the highest hole
// that is large enough, and everything else the lowest. Activations stack up from below, and gradients come down from
// above where activations were freed. What lies between is free, in one piece.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_set>

namespace {

constexpr size_t LINE = 64;                 // torch's alignment; a block's size stands in the line before it
constexpr size_t LEAST = size_t{1} << 16;   // tensors below are left to malloc
constexpr size_t GROWTH = size_t{1} << 26;  // what is asked of the system at a time; only what is touched takes memory
constexpr size_t TOUCHED = size_t{1} << 23; // at a time: meanwhile no other thread gets addresses
constexpr int POPULATE_WRITE = 23;          // of madvise, since Linux 5.14; older headers do not have it

class Memory {
 public:
  // Takes addresses, twice as many as the machine has memory, and no memory. False where the system gives none.
  bool reserve() {
    page_ = sysconf(_SC_PAGESIZE);
    const size_t range = 2 * page_ * sysconf(_SC_PHYS_PAGES);
    void* found = mmap(nullptr, range, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return false;
    start_ = end_ = usable_ = static_cast<char*>(found);
    limit_ = start_ + range;
    return true;
  }

  void keep_apart(size_t bytes) {
    std::lock_guard<std::mutex> guard(mutex);
    long_lived_.insert(round(bytes));
  }

  // nullptr where the system has none.
  void* allocate(size_t wanted) {
    const size_t bytes = round(wanted);
    std::lock_guard<std::mutex> guard(mutex);
    char* block = long_lived_.count(bytes) ? take_high(bytes) : take_low(bytes);
    if (!block && !(block = grow(bytes))) return nullptr;
    *reinterpret_cast<size_t*>(block) = bytes;
    if ((used_ += bytes) > most_) most_ = used_;
    return block + LINE;
  }

  // False where the address is none of ours.
  bool free(void* address) {
    char* block = static_cast<char*>(address) - LINE;
    if (block < start_ || block >= limit_) return false;
    std::lock_guard<std::mutex> guard(mutex);
    const size_t bytes = *reinterpret_cast<size_t*>(block);
    used_ -= bytes;
    auto hole = holes_.emplace(block, bytes).first;
    auto next = std::next(hole);
    if (next != holes_.end() && block + bytes == next->first) {
      hole->second += next->second;
      holes_.erase(next);
    }
    if (hole != holes_.begin()) {
      auto before = std::prev(hole);
      if (before->first + before->second == block) {
        before->second += hole->second;
        holes_.erase(hole);
      }
    }
    return true;
  }

  // Has the system provide memory behind what was used, which the first tensors there would wait for, page by page.
  void touch_ahead(size_t bytes) {
    char *at, *end;
    {
      std::lock_guard<std::mutex> guard(mutex);
      at = end_ + page_ - reinterpret_cast<uintptr_t>(end_) % page_;
      if (at > limit_ || bytes > static_cast<size_t>(limit_ - at) || !make_usable(at + bytes)) return;
      end = at + bytes;
    }
    for (; at < end; at += TOUCHED)
      if (madvise(at, at + TOUCHED < end ? TOUCHED : end - at, POPULATE_WRITE)) return;
  }

  // The system has the memory of holes again; the addresses stay.
  void give_back() {
    std::lock_guard<std::mutex> guard(mutex);
    for (const auto& [hole, bytes] : holes_) {
      const uintptr_t first = (reinterpret_cast<uintptr_t>(hole) + page_ - 1) / page_ * page_;
      const uintptr_t last = reinterpret_cast<uintptr_t>(hole + bytes) / page_ * page_;
      if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
    }
  }

  // The bytes of the range that were ever used, and those that were used at the same time at most.
  void measure(size_t* extent, size_t* most) {
    std::lock_guard<std::mutex> guard(mutex);
    *extent = end_ - start_;
    *most = most_;
  }

  std::mutex mutex;

 private:
  static size_t round(size_t bytes) { return (bytes + 2 * LINE - 1) / LINE * LINE; }

  char* take_low(size_t bytes) {
    for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
      if (hole->second < bytes) continue;
      const auto [block, size] = *hole;
      auto next = holes_.erase(hole);
      if (size > bytes) holes_.emplace_hint(next, block + bytes, size - bytes);
      return block;
    }
    return nullptr;
  }

  char* take_high(size_t bytes) {
    for (auto hole = holes_.rbegin(); hole != holes_.rend(); ++hole) {
      if (hole->second < bytes) continue;
      hole->second -= bytes;
      char* block = hole->first + hole->second;
      if (!hole->second) holes_.erase(hole->first);
      return block;
    }
    return nullptr;
  }

  // A block at the end, which a hole there is a part of.
  char* grow(size_t bytes) {
    char* block = end_;
    auto last = holes_.end();
    if (!holes_.empty() && (--last)->first + last->second == end_) block = last->first;
    if (bytes > static_cast<size_t>(limit_ - block)) return nullptr;
    if (!make_usable(block + bytes)) return nullptr;
    if (block != end_) holes_.erase(last);
    end_ = block + bytes;
    return block;
  }

  bool make_usable(char* end) {
    if (end <= usable_) return true;
    size_t more = (end - usable_ + GROWTH - 1) / GROWTH * GROWTH;
    if (more > static_cast<size_t>(limit_ - usable_)) more = limit_ - usable_;
    if (mprotect(usable_, more, PROT_READ | PROT_WRITE)) return false;
    usable_ += more;
    return true;
  }

  char *start_ = nullptr, *end_ = nullptr, *usable_ = nullptr, *limit_ = nullptr;
  size_t page_ = 0, used_ = 0, most_ = 0;
  std::map<char*, size_t> holes_;  // no two of them touch
  std::unordered_set<size_t> long_lived_;
};

Memory& memory() {
  static Memory* const one = new Memory;  // It outlives every tensor.
  return *one;
}

void give(void* at) {
  if (!at) return;
  c10::profiledCPUMemoryReporter().Delete(at);
  if (!memory().free(at)) c10::free_cpu(at);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* at = bytes >= LEAST ? memory().allocate(bytes) : nullptr;
    if (!at) at = c10::alloc_cpu(bytes);  // which says what is wrong where there is no memory
    c10::profiledCPUMemoryReporter().New(at, bytes);
    return {at, at, &give, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

extern "C" {

// From here on torch's tensors on the CPU have their memory here. 0 where the system does not allow it.
int use_memory() {
  static Allocator* const allocator = []() -> Allocator* {
    if (!memory().reserve()) return nullptr;
    pthread_atfork([] { memory().mutex.lock(); }, [] { memory().mutex.unlock(); }, [] { memory().mutex.unlock(); });
    return new Allocator;
  }();
  if (!allocator) return 0;
  c10::SetCPUAllocator(allocator);
  return 1;
}

// Tensors of this size live long.
void keep_apart(size_t bytes) { memory().keep_apart(bytes); }

void touch_memory_ahead(size_t bytes) { memory().touch_ahead(bytes); }

void give_back_memory() { memory().give_back(); }

void measure_memory(size_t* extent, size_t* most) { memory().measure(extent, most); }
}

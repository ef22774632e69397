// Runs CUDA kernels on the host, one block after another, every thread of a block as a fiber.
//
// A fiber runs until it waits in a barrier or a warp operation; then the first one that can run
// does, in the order the seed says: 0 ascending, 1 descending, any other a shuffle. In ascending
// and descending order the first warp comes to a barrier before the second begins, so what a
// missing barrier would leave to chance on a device is wrong here in one of the two. Shared
// memory is filled with 0xFF (a NaN in every float format) before each block and followed by a
// guard. Warp operations exchange values when every lane of their mask has come to them.
//
// One launch at a time; no atomics. Include it through cuda/device.h.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

constexpr unsigned WARP = 32;
constexpr size_t STACK_BYTES = 128 * 1024, GUARD_BYTES = 256;
constexpr unsigned char POISON = 0xFF, GUARD = 0xA5;

struct Launch {
  uint32_t grid[3];
  uint32_t block;
  uint64_t shared_bytes;
  uint64_t seed;
};

enum class State { ready, at_barrier, in_warp, done };

struct Fiber {
  unsigned index = 0;
  State state = State::done;
  unsigned mask = 0;              // of the warp operation it waits in
  uint64_t given = 0, taken = 0;  // its value there, and what it receives
  int source = -1;                // the lane it receives from; none: the operation is __syncwarp
  ucontext_t start;
  jmp_buf resume;
  bool started = false;
  std::unique_ptr<char[]> stack;
};

class Machine {
 public:
  // What went wrong, empty if nothing did.
  std::string run(const Launch& launch, std::function<void()> kernel) {
    kernel_ = std::move(kernel);
    blockDim = {launch.block, 1, 1};
    gridDim = {launch.grid[0], launch.grid[1], launch.grid[2]};
    while (fibers_.size() < launch.block) fibers_.push_back(std::make_unique<Fiber>());
    num_threads_ = launch.block;
    const std::vector<unsigned> threads = order(launch.block, launch.seed);
    const uint64_t blocks = (uint64_t)gridDim.x * gridDim.y * gridDim.z;
    for (uint64_t i = 0; i < blocks; ++i) {
      const uint64_t block = launch.seed == 1 ? blocks - 1 - i : i;
      blockIdx = {(unsigned)(block % gridDim.x), (unsigned)(block / gridDim.x % gridDim.y),
                  (unsigned)(block / gridDim.x / gridDim.y)};
      shared_.assign(launch.shared_bytes + GUARD_BYTES + 15, POISON);
      std::fill_n(shared() + launch.shared_bytes, GUARD_BYTES, GUARD);
      std::string error = run_block(threads);
      if (error.empty()) error = check_guard(launch.shared_bytes);
      if (!error.empty()) return error + " in block " + std::to_string(block);
    }
    return "";
  }

  unsigned char* shared() {
    return (unsigned char*)(((uintptr_t)shared_.data() + 15) / 16 * 16);
  }

  void block_barrier() {
    running_->state = State::at_barrier;
    give_way();
  }

  // `source` < 0 receives nothing. A lane outside the mask gives poison.
  uint64_t exchange(unsigned mask, uint64_t value, int source) {
    Fiber& self = *running_;
    self.mask = mask;
    self.given = value;
    self.source = source;
    self.state = State::in_warp;
    complete_warp(self);
    if (self.state == State::in_warp) give_way();
    return self.taken;
  }

  unsigned lane() const { return running_->index % WARP; }

 private:
  static std::vector<unsigned> order(unsigned count, uint64_t seed) {
    std::vector<unsigned> result(count);
    for (unsigned i = 0; i < count; ++i) result[i] = seed == 1 ? count - 1 - i : i;
    if (seed > 1) std::shuffle(result.begin(), result.end(), std::mt19937_64(seed));
    return result;
  }

  std::string run_block(const std::vector<unsigned>& threads) {
    for (unsigned i : threads) {
      fibers_[i]->index = i;
      fibers_[i]->state = State::ready;
    }
    for (;;) {
      for (size_t at = 0; at < threads.size();) {
        Fiber& fiber = *fibers_[threads[at]];
        woken_ = false;
        if (fiber.state == State::ready) resume(fiber);
        at = woken_ ? 0 : at + 1;
      }
      unsigned done = 0, waiting = 0;
      for (unsigned i : threads) {
        done += fibers_[i]->state == State::done;
        waiting += fibers_[i]->state == State::at_barrier;
      }
      if (done == num_threads_) return "";
      if (done + waiting < num_threads_) return stuck(threads);
      for (unsigned i : threads) {
        if (fibers_[i]->state == State::at_barrier) fibers_[i]->state = State::ready;
      }
    }
  }

  // The fibers keep half-run kernels on their stacks, so new ones take their place.
  std::string stuck(const std::vector<unsigned>& threads) {
    std::string error = "a warp operation is not reached by all lanes of its mask: thread ";
    for (unsigned i : threads) {
      if (fibers_[i]->state == State::in_warp) {
        error += std::to_string(i) + " waits";
        break;
      }
    }
    fibers_.clear();
    return error;
  }

  std::string check_guard(size_t shared_bytes) {
    const unsigned char* guard = shared() + shared_bytes;
    const bool whole = std::all_of(guard, guard + GUARD_BYTES, [](auto b) { return b == GUARD; });
    return whole ? "" : "shared memory was written beyond its end";
  }

  void complete_warp(const Fiber& self) {
    const unsigned first = self.index / WARP * WARP;
    for (unsigned lane = 0; lane < WARP; ++lane) {
      if (!(self.mask >> lane & 1u)) continue;
      if (first + lane >= num_threads_) return;
      const Fiber& other = *fibers_[first + lane];
      const bool together = other.state == State::in_warp && other.mask == self.mask &&
                            (other.source < 0) == (self.source < 0);
      if (!together) return;
    }
    const unsigned mask = self.mask;
    for (unsigned lane = 0; lane < WARP; ++lane) {
      if (!(mask >> lane & 1u)) continue;
      Fiber& other = *fibers_[first + lane];
      const bool given = other.source >= 0 && mask >> other.source & 1u;
      other.taken = given ? fibers_[first + other.source]->given : ~(uint64_t)0;
      other.state = State::ready;
    }
    woken_ = true;
  }

  static void body(unsigned high, unsigned low) {
    Machine& machine = *(Machine*)((uintptr_t)high << 32 | low);
    for (;;) {
      machine.kernel_();
      machine.running_->state = State::done;
      machine.give_way();
    }
  }

  // A context is entered once through swapcontext; later switches save the system call.
  void resume(Fiber& fiber) {
    running_ = &fiber;
    threadIdx = {fiber.index, 0, 0};
    if (_setjmp(scheduler_)) return;
    if (fiber.started) _longjmp(fiber.resume, 1);
    fiber.started = true;
    fiber.stack.reset(new char[STACK_BYTES]);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = STACK_BYTES;
    fiber.start.uc_link = nullptr;
    const uintptr_t self = (uintptr_t)this;
    makecontext(&fiber.start, (void (*)())body, 2, (unsigned)(self >> 32), (unsigned)self);
    setcontext(&fiber.start);
  }

  void give_way() {
    if (!_setjmp(running_->resume)) _longjmp(scheduler_, 1);
  }

  std::function<void()> kernel_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<unsigned char> shared_;
  jmp_buf scheduler_;
  Fiber* running_ = nullptr;
  unsigned num_threads_ = 0;
  bool woken_ = false;  // a warp operation ended while the running fiber ran
};

inline Machine machine;

template <class T>
T shuffle(unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = machine.exchange(mask, bits, (int)(source % WARP));
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// `arguments` points to each argument's value, as those of cuLaunchKernel do. The error is null or
// lives until the next launch.
template <class... A, size_t... I>
const char* launch(void (*kernel)(A...), const Launch& launch, void** arguments,
                   std::index_sequence<I...>) {
  static std::string error;
  error = machine.run(launch, [=] { kernel(*(A*)arguments[I]...); });
  return error.empty() ? nullptr : error.c_str();
}

template <class... A>
const char* launch(void (*kernel)(A...), const Launch& how, void** arguments) {
  return launch(kernel, how, arguments, std::index_sequence_for<A...>());
}

}  // namespace emulation

inline void __syncthreads() { emulation::machine.block_barrier(); }

inline void __syncwarp(unsigned mask = ~0u) { emulation::machine.exchange(mask, 0, -1); }

template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
  return emulation::shuffle(mask, value, (unsigned)source);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return emulation::shuffle(mask, value, emulation::machine.lane() ^ (unsigned)lanes);
}

// A lane whose source lies beyond the warp keeps its own value.
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
  const unsigned lane = emulation::machine.lane();
  return emulation::shuffle(mask, value, lane + delta < emulation::WARP ? lane + delta : lane);
}

// Defines the C function `symbol`, through which a kernel (template arguments and all) is launched.
#define MEMKV_EMULATED(symbol, ...)                                                          \
  extern "C" const char* symbol(const emulation::Launch* how, void** arguments) {            \
    return emulation::launch(&__VA_ARGS__, *how, arguments);                                 \
  }

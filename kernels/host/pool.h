// Threads that stay: a caller shares the pieces of one job with them and takes pieces itself.
//
// A job never waits for a thread to begin: what no worker has taken, the caller does. So it ends
// even where workers are missing, as in a forked child. Any number of callers at a time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace memkv {

class Pool {
 public:
  // Lives as long as the process: its sleeping threads must find their lock at exit.
  static Pool& instance() {
    static Pool* pool = new Pool;
    return *pool;
  }

  // piece(i) for every i in [0, count), on up to `threads` threads, the caller's among them.
  template <class Piece>
  void run(int threads, int64_t count, const Piece& piece) {
    Job job;
    job.count = count;
    job.context = &piece;
    job.piece = [](const void* context, int64_t i) { (*static_cast<const Piece*>(context))(i); };
    const int64_t helpers = (threads < count ? threads : count) - 1;
    if (helpers > 0) invite(job, (int)helpers);
    job.work();
    if (helpers > 0) finish(job);
  }

 private:
  struct Job {
    std::atomic<int64_t> next{0};
    int64_t count = 0;
    const void* context = nullptr;
    void (*piece)(const void*, int64_t) = nullptr;
    int active = 0;  // workers inside, under the pool's lock

    void work() {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) piece(context, i);
    }
  };

  void invite(Job& job, int helpers) {
    std::lock_guard<std::mutex> lock(mutex_);
    try {
      for (; num_threads_ < helpers; ++num_threads_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      // The system has no more threads: those there are, and the caller, do the work.
    }
    for (int i = 0; i < helpers; ++i) invitations_.push_back(&job);
    for (int i = 0; i < helpers; ++i) invited_.notify_one();
  }

  void finish(Job& job) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (auto at = invitations_.begin(); at != invitations_.end();) {
      at = *at == &job ? invitations_.erase(at) : at + 1;
    }
    left_.wait(lock, [&] { return job.active == 0; });
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      invited_.wait(lock, [this] { return !invitations_.empty(); });
      Job* job = invitations_.front();
      invitations_.pop_front();
      ++job->active;
      lock.unlock();
      job->work();
      lock.lock();
      if (--job->active == 0) left_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable invited_, left_;
  std::deque<Job*> invitations_;
  int num_threads_ = 0;
};

}  // namespace memkv

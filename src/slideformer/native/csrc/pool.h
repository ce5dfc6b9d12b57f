// A pool of threads that share the chunks of the calls that are running.
//
// A call puts a job on the list, works on it itself and returns when all of its chunks are done. Workers help the
// oldest job that has chunks left, so two callers never wait for the whole of each other's work.
#pragma once

#include <stdint.h>
#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

namespace slideformer {

class Pool {
public:
    using Body = std::function<void(int64_t begin, int64_t end)>;

    // `threads` counts the caller in. Throws std::system_error if a thread cannot be started.
    explicit Pool(int threads);
    // Waits for running calls.
    ~Pool();
    Pool(const Pool&) = delete;

    // Runs body over [0, count) in pieces that start at multiples of `grain`, in any order.
    void run(int64_t count, int64_t grain, const Body& body);

    // True in a child of the process that made the pool: no threads there, and nothing that may be destroyed.
    bool forked() const;

private:
    struct Job {
        const Body& body;
        const int64_t count, chunk;
        std::atomic<int64_t> next{0};
        int helpers = 0;  // workers inside; guarded by mutex_

        bool has_work() const { return next.load(std::memory_order_relaxed) < count; }
        void work();
    };

    void share(Job& job);
    void help_until_stopped();
    void stop();

    const pid_t owner_;
    std::mutex mutex_;
    std::condition_variable has_jobs_, something_ended_;
    std::list<Job*> jobs_;
    int calls_ = 0;
    bool stopping_ = false;
    std::vector<std::thread> workers_;
};

}  // namespace slideformer

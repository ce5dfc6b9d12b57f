// Threads that move the blocks of extents between memory and files, and sum them meanwhile.
//
// A call puts a move on the list and sleeps until all of its blocks are done. Threads take a block from each move in
// turn, so that a short call does not wait for all of a long one.
#pragma once

#include <stdint.h>
#include <sys/types.h>

#include <condition_variable>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

namespace slideformer {

constexpr int64_t kPage = 4096;

// The sum of `num` whole pages, the first of which is page `page` of an extent.
uint64_t checksum(const char* pages, int64_t num, int64_t page);

class Disk {
public:
    struct Result {
        int32_t status;   // 0, an errno, SF_DISK_SHORT or SF_DISK_STOPPED
        int64_t missing;  // SF_DISK_SHORT: bytes that did not move,
        int64_t offset;   // and where in the file they begin
        uint64_t sum;
    };

    // Throws std::system_error if a thread cannot be started, std::bad_alloc.
    // sums: of what moves; without them every sum is 0.
    Disk(int threads, int64_t block_nbytes, bool sums);
    ~Disk();
    Disk(const Disk&) = delete;

    // head: a page, before the data in the file; it is written, or read into.
    Result move(bool write, int file, int64_t offset, char* head, char* data, int64_t nbytes);

    // Blocks under way are finished, what nobody has begun is dropped, and the threads end. May be called again.
    void stop();

    // True in a child of the process that made it: no threads there, and nothing that may be destroyed.
    bool forked() const;

private:
    struct Move;
    struct Own;

    void serve(Own& own);

    const pid_t owner_;
    const int64_t block_nbytes_;
    const bool sums_;
    std::mutex mutex_;
    std::condition_variable has_blocks_, something_ended_;
    std::list<Move*> moves_;  // those with blocks that nobody has begun
    bool stopping_ = false;
    std::list<Own> owns_;
    std::vector<std::thread> threads_;
};

}  // namespace slideformer

// How fast does a file take and give blocks past the cache: from threads that each wait for one, or through io_uring?
//
//     g++ -O2 -std=c++17 -pthread disk_engines.cpp -o disk_engines
//     disk_engines FILE NBYTES BLOCK_NBYTES DEPTH MEMORY_NBYTES REPEATS
//
// FILE is there, has at least NBYTES, and all of them have been written once. Blocks move from and to MEMORY_NBYTES in
// turn: what stays in a cache moves faster than what a run has. One line for each engine and case: engine, case, and
// seconds of each repeat. `mix` reads the first half while it writes the second, block by block in turn.
// io_uring is spoken to through its system calls, with one ring, registered memory and one thread. benchmarks/disk.py
// compiles and calls this.
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace {

struct Op {
    bool write;
    int64_t offset;
};

[[noreturn]] void die(const char* what, int error) {
    fprintf(stderr, "%s: %s\n", what, strerror(error));
    exit(1);
}

std::vector<Op> ops_of(const std::string& kind, int64_t blocks, int64_t block) {
    std::vector<Op> ops;
    if (kind == "mix") {
        for (int64_t i = 0; i < blocks / 2; ++i) {
            ops.push_back({false, i * block});
            ops.push_back({true, (blocks / 2 + i) * block});
        }
    } else {
        for (int64_t i = 0; i < blocks; ++i) ops.push_back({kind == "write", i * block});
    }
    return ops;
}

// Memory for `depth` blocks at a time. Each has several places of its own, used in turn.
class Memory {
public:
    Memory(int64_t nbytes, int64_t block, int depth)
        : block_(block), depth_(depth), places_(std::max<int64_t>(nbytes / block / depth, 1)), turns_(depth) {
        size_ = depth * places_ * block;
        void* at = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        if (at == MAP_FAILED) die("memory", errno);
        start_ = static_cast<char*>(at);
        uint64_t state = 88172645463325252u;  // xorshift: some disks compress what repeats
        for (int64_t i = 0; i < size_ / 8; ++i) {
            state ^= state << 13, state ^= state >> 7, state ^= state << 17;
            reinterpret_cast<uint64_t*>(start_)[i] = state;
        }
    }
    char* next(int own) { return start_ + (turns_[own]++ % places_ * depth_ + own) * block_; }
    iovec whole() const { return {start_, static_cast<size_t>(size_)}; }

private:
    char* start_;
    int64_t size_, block_, depth_, places_;
    std::vector<int64_t> turns_;
};

void by_threads(int file, const std::vector<Op>& ops, Memory& memory, int64_t block, int depth) {
    std::atomic<size_t> next{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < depth; ++t) {
        threads.emplace_back([&, t] {
            for (size_t i; (i = next.fetch_add(1)) < ops.size();) {
                char* own = memory.next(t);
                const ssize_t moved = ops[i].write ? pwrite(file, own, block, ops[i].offset)
                                                   : pread(file, own, block, ops[i].offset);
                if (moved != block) die("a block", moved < 0 ? errno : EIO);
            }
        });
    }
    for (auto& thread : threads) thread.join();
}

class Ring {
public:
    Ring(int depth, Memory& memory, int64_t block) : memory_(memory), block_(block), depth_(depth) {
        io_uring_params params{};
        fd_ = static_cast<int>(syscall(SYS_io_uring_setup, depth, &params));
        if (fd_ < 0) die("io_uring_setup", errno);
        const size_t sq = params.sq_off.array + params.sq_entries * sizeof(unsigned);
        const size_t cq = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
        char* submission = map(sq, IORING_OFF_SQ_RING);
        char* completion = map(cq, IORING_OFF_CQ_RING);
        entries_ = reinterpret_cast<io_uring_sqe*>(map(params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES));
        sq_tail_ = reinterpret_cast<unsigned*>(submission + params.sq_off.tail);
        sq_mask_ = *reinterpret_cast<unsigned*>(submission + params.sq_off.ring_mask);
        sq_array_ = reinterpret_cast<unsigned*>(submission + params.sq_off.array);
        cq_head_ = reinterpret_cast<unsigned*>(completion + params.cq_off.head);
        cq_tail_ = reinterpret_cast<unsigned*>(completion + params.cq_off.tail);
        cq_mask_ = *reinterpret_cast<unsigned*>(completion + params.cq_off.ring_mask);
        done_ = reinterpret_cast<io_uring_cqe*>(completion + params.cq_off.cqes);
        const iovec whole = memory.whole();
        fixed_ = syscall(SYS_io_uring_register, fd_, IORING_REGISTER_BUFFERS, &whole, 1) == 0;
    }

    void run(int file, const std::vector<Op>& ops) {
        std::vector<int> free_blocks;
        for (int i = 0; i < depth_; ++i) free_blocks.push_back(i);
        size_t next = 0, over = 0;
        while (over < ops.size()) {
            unsigned queued = 0;
            for (; next < ops.size() && !free_blocks.empty(); ++next, ++queued) {
                queue(file, ops[next], free_blocks.back());
                free_blocks.pop_back();
            }
            if (syscall(SYS_io_uring_enter, fd_, queued, 1, IORING_ENTER_GETEVENTS, nullptr, 0) < 0)
                die("io_uring_enter", errno);
            unsigned head = *cq_head_;
            for (; head != __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE); ++head, ++over) {
                const io_uring_cqe& one = done_[head & cq_mask_];
                if (one.res != block_) die("a block", one.res < 0 ? -one.res : EIO);
                free_blocks.push_back(static_cast<int>(one.user_data));
            }
            __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
        }
    }

private:
    char* map(size_t nbytes, off_t which) {
        void* at = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, which);
        if (at == MAP_FAILED) die("io_uring's memory", errno);
        return static_cast<char*>(at);
    }

    void queue(int file, const Op& op, int own) {
        const unsigned tail = *sq_tail_, index = tail & sq_mask_;
        io_uring_sqe& entry = entries_[index];
        memset(&entry, 0, sizeof entry);
        if (fixed_) entry.opcode = op.write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
        else entry.opcode = op.write ? IORING_OP_WRITE : IORING_OP_READ;
        entry.fd = file;
        entry.off = op.offset;
        entry.addr = reinterpret_cast<uint64_t>(memory_.next(own));
        entry.len = static_cast<unsigned>(block_);
        entry.user_data = own;
        sq_array_[index] = index;
        __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
    }

    Memory& memory_;
    int64_t block_;
    int depth_, fd_;
    bool fixed_;
    io_uring_sqe* entries_;
    io_uring_cqe* done_;
    unsigned *sq_tail_, *sq_array_, *cq_head_, *cq_tail_;
    unsigned sq_mask_, cq_mask_;
};

}  // namespace

int main(int count, char** words) {
    if (count != 7) die("usage: disk_engines FILE NBYTES BLOCK_NBYTES DEPTH MEMORY_NBYTES REPEATS", EINVAL);
    const int64_t block = atoll(words[3]), blocks = atoll(words[2]) / block;
    const int depth = atoi(words[4]), repeats = atoi(words[6]);
    int file = open(words[1], O_RDWR | O_DIRECT);
    if (file < 0 && errno == EINVAL) file = open(words[1], O_RDWR);
    if (file < 0) die(words[1], errno);
    Memory memory(atoll(words[5]), block, depth);
    Ring ring(depth, memory, block);
    const std::vector<std::pair<const char*, std::function<void(const std::vector<Op>&)>>> engines = {
        {"threads", [&](const std::vector<Op>& ops) { by_threads(file, ops, memory, block, depth); }},
        {"io_uring", [&](const std::vector<Op>& ops) { ring.run(file, ops); }},
    };
    for (const char* kind : {"write", "read", "mix"}) {
        const std::vector<Op> ops = ops_of(kind, blocks, block);
        std::vector<std::string> lines;
        for (const auto& engine : engines) lines.push_back(std::string(engine.first) + " " + kind);
        for (int repeat = 0; repeat < repeats; ++repeat) {  // the engines in turn, so that a slow moment meets both
            for (size_t e = 0; e < engines.size(); ++e) {
                const auto began = std::chrono::steady_clock::now();
                engines[e].second(ops);
                const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
                lines[e] += " " + std::to_string(took.count());
            }
        }
        for (const auto& line : lines) puts(line.c_str());
    }
}

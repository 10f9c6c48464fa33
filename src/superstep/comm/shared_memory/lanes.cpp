// Collectives between processes of one host, through memory that they share.
//
//     seats     one for each rank: a bell to sleep by, and whether it has gone
//     counts    steps that each rank has posted, and has read; chunks in each letter box
//     boards    for each rank, SLOTS slots that every other rank reads
//     boxes     for each pair of ranks, SLOTS slots from the one to the other
//
// A collective is a number of steps that follows from its sizes alone. In each, every rank posts a slot on its board and
// reads the others'; a slot is used again once all have read it. Messages and all-to-alls go through the boxes. Sums are
// in rank order, in fp32 at least, and rounded once: all ranks get the same bits, on every run.
//
// A lane is what a group's operations stand in line on. The head is driven by whoever waits for it, or by a thread of
// the lane's own: which takes over what was started and cannot be finished at once. Nobody spins for longer than told;
// who has nothing to do sleeps on its bell, and looks now and then whether those it waits for are alive.

#include <sys/mman.h>

#include <system_error>

#include "line.h"

using namespace superstep;

struct Handle {
    std::shared_ptr<Operation> op;
};

extern "C" {

int64_t lane_bytes(int64_t size) {
    return head_bytes(size) + (size + size * size) * SLOTS * SLOT;
}

// Opens a group's part of the file, which begins at ``offset`` and is all zeros at first. ``locks`` says for each rank
// of the group the byte of the file that its process keeps locked.
Lane* lane_open(int file, int64_t offset, int64_t me, int64_t size, const int64_t* locks, double timeout_s,
                int64_t spin_ns) {
    const int64_t length = lane_bytes(size);
    void* base = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, offset);
    if (base == MAP_FAILED) return nullptr;
    Lane* lane = new Lane;
    lane->base = static_cast<char*>(base);
    lane->length = length;
    lane->file = file;
    lane->me = me;
    lane->size = size;
    lane->locks.assign(locks, locks + size);
    lane->timeout_s = timeout_s;
    lane->spin_ns = spin_ns;
    lane->seats = reinterpret_cast<Seat*>(base);
    lane->posted = reinterpret_cast<Count*>(lane->seats + size);
    lane->read = lane->posted + size;
    lane->box_posted = lane->read + size;
    lane->box_taken = lane->box_posted + size * size;
    lane->boards = lane->base + head_bytes(size);
    lane->boxes = lane->boards + size * SLOTS * SLOT;
    return lane;
}

// Starts an operation. ``is_waited``: the caller waits for it at once, so that no thread need take it over.
Handle* lane_start(Lane* lane, int64_t kind, int64_t type, int64_t rule, int64_t peer, const void* in, void* out,
                   int64_t count, const int64_t* going, const int64_t* coming, int64_t is_waited) {
    auto op = std::make_shared<Operation>();
    op->kind = Kind(kind);
    op->type = Type(type);
    op->rule = Rule(rule);
    op->peer = peer;
    op->in = static_cast<const char*>(in);
    op->out = static_cast<char*>(out);
    op->count = count;
    if (op->kind >= ALL_TO_ALL) {
        for (auto* list : {&op->going, &op->coming, &op->going_at, &op->coming_at, &op->sent, &op->got})
            list->assign(lane->size, 0);
        const int64_t bytes = count * width(op->type);
        if (op->kind == SEND) op->going[peer] = bytes;
        if (op->kind == RECEIVE) op->coming[peer] = bytes;
        for (int64_t q = 0, out_at = 0, in_at = 0; op->kind == ALL_TO_ALL && q < lane->size; ++q) {
            op->going[q] = going[q];
            op->coming[q] = coming[q];
            op->going_at[q] = in_at;
            op->coming_at[q] = out_at;
            in_at += going[q];
            out_at += coming[q];
        }
    }
    std::unique_lock lock(lane->mutex);
    if (lane->failed != DONE || lane->is_closing.load()) {
        op->culprit = lane->culprit;
        op->status.store(lane->failed != DONE ? lane->failed : CLOSED);
        return new Handle{op};
    }
    lane->line.push_back(op);
    const bool is_alone = lane->line.size() == 1;
    if (!lane->is_driven) {
        lane->is_driven = true;
        pass(*lane, lock);
        lane->is_driven = false;
        lane->changed.notify_all();
    } else {
        lane->wake_driver();
    }
    if (op->status.load() == UNDER_WAY && !is_waited && !(is_alone && is_heard(*op))) {
        try {
            if (!lane->thread.joinable()) lane->thread = std::thread([lane] { serve(*lane); });
        } catch (const std::system_error&) {  // there are too many: who waits for it drives it
        }
        lane->wants_thread = true;
        lane->changed.notify_all();
    }
    return new Handle{op};
}

// Returns once the operation has come to its end, good or bad.
void lane_wait(Lane* lane, const Handle* handle) {
    const Operation& op = *handle->op;
    if (op.status.load() != UNDER_WAY) return;
    std::unique_lock lock(lane->mutex);
    while (op.status.load() == UNDER_WAY) {
        if (lane->is_driven || lane->is_closing.load())
            lane->changed.wait(lock);
        else
            drive(*lane, lock, &op);
    }
}

// Moves what can be moved at once, where nobody does.
void lane_pass(Lane* lane) {
    std::unique_lock lock(lane->mutex);
    if (lane->is_driven || lane->is_closing.load() || lane->line.empty()) return;
    lane->is_driven = true;
    pass(*lane, lock);
    lane->is_driven = false;
    lane->changed.notify_all();
}

int lane_look(const Handle* handle, int64_t* culprit) {
    *culprit = handle->op->culprit;
    return handle->op->status.load();
}

void lane_drop(Handle* handle) { delete handle; }

// Says to the others that this rank has left, and ends what is under way.
void lane_close(Lane* lane) {
    if (getpid() != lane->owner) return;  // a fork of the rank, that is none
    {
        std::unique_lock lock(lane->mutex);
        if (lane->is_closing.exchange(true)) return;
        lane->wake_driver();
        lane->changed.notify_all();
        lane->changed.wait(lock, [&] { return !lane->is_driven; });
        fail(*lane, CLOSED, -1);
        lane->changed.notify_all();
        lane->seats[lane->me].left.store(1);
        lane->ring_all();
    }
    if (lane->thread.joinable()) lane->thread.join();
    munmap(lane->base, lane->length);
}

void lane_free(Lane* lane) {
    if (getpid() != lane->owner) return;
    lane_close(lane);
    delete lane;
}

}  // extern "C"

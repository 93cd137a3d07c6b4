//! Fences: whether every request that was queued before a moment has been carried out.
//!
//! A *lane* is a thread that takes requests from the kernel, one at a time. A fence is raised by a
//! request of a client (`ramet_fs::fence`), which the kernel queues behind all earlier requests. A
//! lane has *cleared* a fence when it certainly holds no request from before the fence, and will
//! not get one. A fence has passed when all lanes have cleared it.
//!
//! A lane that waits in the kernel is the hard case: the kernel may have handed a request to it
//! that the lane has not seen yet. No other thread can tell this, so the lane itself has to clear
//! the fence.
//!
//! - *Requests read from `/dev/fuse`* come from one queue, in its order. Every request ahead of the
//!   one that raised the fence was read before it. So a lane clears the fence when it ends any
//!   request after the fence was raised, or takes none at the moment. An idle lane gets a request
//!   because the client repeats its own: the kernel hands each request to the lane that has waited
//!   longest.
//! - *Rings* have a queue for each processor, and each queue gives its requests out in order. A
//!   lane clears the fence when it finds its entry empty: the kernel leaves no request in a queue
//!   that has a free entry. Lanes that wait are woken for that ([`Fences::raise`]). A lane whose
//!   queue is never empty clears the fence when it begins a request with a higher number than that
//!   of the fence: numbers are given before requests are queued, so all older requests have left
//!   the queue.
//!
//! The kernel holds *background* requests back, write-back among them, while as many as
//! [`BACKGROUND_MAX`] are under way, and syncfs(2) skips a file while as many wait. A fence is not
//! behind a request that is held back, or behind a file that is skipped. But in that case at least
//! that many requests are begun or ended between the call before syncfs(2) and the moment when the
//! fence has passed. The server counts them, and another round is due if there were so many.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::Waker;

use parking_lot::Mutex;
use ramet_fs::fence::{Fence, FenceCall};

use crate::protocol::negotiate::BACKGROUND_MAX;

/// Limits for a mount by a user other than root: the background requests that the kernel allows,
/// and the number from which it skips files.
const USER_BACKGROUND_MAX: [&str; 2] = [
    "/sys/module/fuse/parameters/max_user_bgreq",
    "/sys/module/fuse/parameters/max_user_congthresh",
];
/// The kernel's least limit where it tells no other number: three quarters of 12.
const LEAST_BACKGROUND_MAX: u64 = 9;
/// Number of the first request of a connection if one counter numbers all of them.
const FIRST_REQUEST: u64 = 2;

/// A thread that takes requests from the kernel.
pub(crate) struct Lane {
    /// The newest fence that the lane has cleared by holding no request.
    cleared: AtomicU64,
    /// The kernel's number of the last request that the lane began; 0 if numbers tell nothing.
    request: AtomicU64,
    /// Whether the lane takes no request at the moment, and holds none.
    rests: AtomicBool,
    /// Ends the lane's wait, if it can be ended.
    waker: Option<Waker>,
}

/// All lanes of a mount and the fences that were raised.
pub(crate) struct Fences {
    /// Number of the newest fence.
    newest: AtomicU64,
    lanes: Mutex<Vec<Arc<Lane>>>,
    /// Number of lanes of the mount, whether they have begun a request or not.
    expected: AtomicUsize,
    /// Whether a request has a higher number than those that were queued before it.
    is_numbered: AtomicBool,
    background_max: u64,
}

impl Fences {
    pub(crate) fn new() -> Self {
        let allowed_to_user = USER_BACKGROUND_MAX.map(|path| {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            text.trim().parse().unwrap_or(LEAST_BACKGROUND_MAX)
        });
        let allowed = if rustix::process::geteuid().is_root() {
            u64::MAX
        } else {
            allowed_to_user.into_iter().min().expect("there are two")
        };
        Self {
            newest: AtomicU64::new(0),
            lanes: Mutex::default(),
            expected: AtomicUsize::new(usize::MAX),
            is_numbered: AtomicBool::new(false),
            background_max: allowed.min(u64::from(BACKGROUND_MAX)),
        }
    }

    /// The connection begins with a request of this number.
    pub(crate) fn begins_with(&self, request: u64) {
        let is_numbered = request == FIRST_REQUEST;
        self.is_numbered.store(is_numbered, Ordering::SeqCst);
    }

    /// `count` lanes take requests. No fence passes before all of them exist.
    pub(crate) fn expect_lanes(&self, count: usize) {
        self.expected.store(count, Ordering::SeqCst);
    }

    /// Adds a lane, which must happen before its first request; `waker` ends its wait for one.
    pub(crate) fn add_lane(&self, waker: Option<Waker>) -> Arc<Lane> {
        let lane = Arc::new(Lane {
            cleared: AtomicU64::new(0),
            request: AtomicU64::new(0),
            rests: AtomicBool::new(false),
            waker,
        });
        self.lanes.lock().push(Arc::clone(&lane));
        lane
    }

    /// Number of the newest fence.
    pub(crate) fn newest(&self) -> u64 {
        self.newest.load(Ordering::SeqCst)
    }

    /// The answer to `asked`, which came as the request with this number. `begun` is the number of
    /// requests so far that may be background requests.
    pub(crate) fn answer(&self, asked: Fence, request: u64, begun: u64) -> Fence {
        match asked.call {
            FenceCall::Look => Fence { begun, ..asked },
            FenceCall::Raise => {
                let number = self.raise();
                self.judge(
                    Fence {
                        number,
                        request,
                        ..asked
                    },
                    begun,
                )
            }
            FenceCall::Wait | FenceCall::Hold => self.judge(asked, begun),
        }
    }

    /// Raises a fence, and wakes lanes that wait, so that they look whether they hold a request.
    fn raise(&self) -> u64 {
        let number = self.newest.fetch_add(1, Ordering::SeqCst) + 1;
        for waker in self
            .lanes
            .lock()
            .iter()
            .filter_map(|lane| lane.waker.as_ref())
        {
            waker.wake_by_ref();
        }
        number
    }

    /// Whether the fence has passed, and is behind all requests that it must be behind.
    fn judge(&self, fence: Fence, begun: u64) -> Fence {
        let lanes = self.lanes.lock();
        let is_numbered = self.is_numbered.load(Ordering::SeqCst);
        let has_passed = lanes.len() >= self.expected.load(Ordering::SeqCst)
            && lanes.iter().all(|lane| {
                lane.rests.load(Ordering::SeqCst)
                    || lane.cleared.load(Ordering::SeqCst) >= fence.number
                    || is_numbered && lane.request.load(Ordering::SeqCst) >= fence.request.max(1)
            });
        // Each lane may have been about one more request when the counting began.
        let others = begun.saturating_sub(fence.begun) + lanes.len() as u64;
        if !has_passed {
            let call = FenceCall::Wait;
            return Fence { call, ..fence };
        }
        let call = if others >= self.background_max {
            FenceCall::Raise
        } else {
            FenceCall::Look
        };
        Fence {
            call,
            begun,
            ..fence
        }
    }
}

impl Lane {
    /// The lane of a ring begins the request of this number.
    pub(crate) fn begins(&self, request: u64) {
        self.request.store(request, Ordering::SeqCst);
    }

    /// The lane holds no request, and has found so after the fence of this number was raised.
    pub(crate) fn clears(&self, fence: u64) {
        if self.cleared.load(Ordering::Relaxed) != fence {
            self.cleared.store(fence, Ordering::SeqCst);
        }
    }

    /// The lane of `/dev/fuse` takes no request while `work` goes on.
    pub(crate) fn rest(&self, work: impl FnOnce()) {
        self.rests.store(true, Ordering::SeqCst);
        work();
        self.rests.store(false, Ordering::SeqCst);
    }

    /// The lane takes no more requests.
    pub(crate) fn ends(&self) {
        self.rests.store(true, Ordering::SeqCst);
    }

    /// Whether the lane has cleared the fence of this number.
    pub(crate) fn has_cleared(&self, fence: u64) -> bool {
        self.cleared.load(Ordering::Relaxed) >= fence
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fence that the request `request` raises, after `begun` others.
    fn raise(fences: &Fences, request: u64, begun: u64) -> Fence {
        let asked = Fence {
            call: FenceCall::Raise,
            begun,
            number: 0,
            request: 0,
        };
        fences.answer(asked, request, begun)
    }

    fn of_lanes(count: usize) -> (Fences, Vec<Arc<Lane>>) {
        let fences = Fences::new();
        fences.begins_with(FIRST_REQUEST);
        fences.expect_lanes(count);
        let lanes = (0..count).map(|_| fences.add_lane(None)).collect();
        (fences, lanes)
    }

    fn after(fences: &Fences, fence: Fence, begun: u64) -> FenceCall {
        fences.answer(fence, 0, begun).call
    }

    #[test]
    fn a_fence_waits_for_every_lane_and_for_those_to_come() {
        let (fences, lanes) = of_lanes(2);
        let fence = raise(&fences, 10, 0);
        assert_eq!(fence.call, FenceCall::Wait);
        lanes[0].clears(fences.newest());
        assert_eq!(after(&fences, fence, 0), FenceCall::Wait);
        fences.expect_lanes(3);
        lanes[1].clears(fences.newest());
        assert_eq!(after(&fences, fence, 0), FenceCall::Wait);
        let late = fences.add_lane(None);
        assert_eq!(after(&fences, fence, 0), FenceCall::Wait);
        late.clears(fences.newest());
        assert_eq!(after(&fences, fence, 0), FenceCall::Look);
    }

    #[test]
    fn a_lane_that_cleared_an_older_fence_has_not_cleared_this_one() {
        let (fences, lanes) = of_lanes(1);
        raise(&fences, 10, 0);
        lanes[0].clears(fences.newest());
        let fence = raise(&fences, 20, 0);
        assert_eq!(after(&fences, fence, 0), FenceCall::Wait);
        assert!(!lanes[0].has_cleared(fences.newest()));
    }

    #[test]
    fn a_lane_that_is_never_idle_clears_a_fence_by_a_later_request() {
        let (fences, lanes) = of_lanes(1);
        lanes[0].begins(8);
        let fence = raise(&fences, 10, 0);
        assert_eq!(after(&fences, fence, 0), FenceCall::Wait);
        lanes[0].begins(12);
        assert_eq!(after(&fences, fence, 0), FenceCall::Look);
        // The numbers of a kernel that counts for each processor tell no order.
        fences.begins_with(2 * 8192 + 2);
        assert_eq!(after(&fences, fence, 0), FenceCall::Wait);
    }

    #[test]
    fn a_round_in_which_the_kernel_may_have_held_requests_back_is_repeated() {
        let (fences, lanes) = of_lanes(1);
        let most = fences.background_max;
        let fence = raise(&fences, 10, 100);
        lanes[0].clears(fences.newest());
        assert_eq!(after(&fences, fence, 100 + most - 2), FenceCall::Look);
        let again = fences.answer(fence, 0, 100 + most - 1);
        assert_eq!(
            (again.call, again.begun),
            (FenceCall::Raise, 100 + most - 1)
        );
    }
}

//! A barrier behind the write-back of mapped pages.
//!
//! A program stores into a page that it mapped, and every reader sees the store at once. The daemon
//! gets it when the kernel writes the page back. syncfs(2) has the kernel queue the write-back of
//! the dirty pages of the mount before it returns, but it does not wait until the daemon has
//! answered. [`write_back`] waits for that: it raises a *fence* in the daemon behind syncfs(2), and
//! asks until the fence has passed: until every request that was queued before it has been carried
//! out. `docs/write-back.md` has the argument.
//!
//! The call never waits in the daemon, so it takes no thread from the requests that it waits for.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use ramet_sys::control_ioctl;

use crate::error::{Error, Result};
use crate::tools::control::{FENCE, FENCE_BYTES};

/// The question or the answer of a call of [`FENCE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FenceCall {
    /// Question: the count of requests so far, to be had before a fence is raised. Answer: the
    /// fence has passed.
    Look,
    /// Question: a new fence behind all requests that are queued. Answer: the fence has passed, but
    /// the kernel may have held write-back back, so that the fence does not stand behind all of it;
    /// another round is due.
    Raise,
    /// Question: whether the fence has passed. Answer: not yet.
    Wait,
    /// Question: whether the kernel has ended the write-back that programs held up when the fence
    /// passed. Answer: not yet.
    Hold,
}

/// A request and an answer of [`FENCE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fence {
    /// The question, or the answer.
    pub call: FenceCall,
    /// Requests that the daemon had begun before the fence was raised.
    pub begun: u64,
    /// The fence, or the wait for held write-back; both are counted from 1.
    pub number: u64,
    /// The kernel's number of the request that raised it.
    pub request: u64,
}

impl Fence {
    /// The first request, before a fence is raised.
    const LOOK: Self = Self {
        call: FenceCall::Look,
        begun: 0,
        number: 0,
        request: 0,
    };

    /// The bytes of a request or an answer.
    #[must_use]
    pub fn encode(&self) -> [u8; FENCE_BYTES] {
        let call: u64 = match self.call {
            FenceCall::Look => 0,
            FenceCall::Raise => 1,
            FenceCall::Wait => 2,
            FenceCall::Hold => 3,
        };
        let mut out = [0; FENCE_BYTES];
        let fields = [call, self.begun, self.number, self.request];
        for (to, field) in out.chunks_exact_mut(8).zip(fields) {
            to.copy_from_slice(&field.to_le_bytes());
        }
        out
    }

    /// Decodes the bytes of [`Fence::encode`].
    ///
    /// # Errors
    /// `Invalid` when the size or the call is not one this version knows.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let (fields, rest) = bytes.as_chunks::<8>();
        let &[call, begun, number, request] = fields else {
            return Err(Error::Invalid("size of a fence request"));
        };
        let call = match u64::from_le_bytes(call) {
            _ if !rest.is_empty() => return Err(Error::Invalid("size of a fence request")),
            0 => FenceCall::Look,
            1 => FenceCall::Raise,
            2 => FenceCall::Wait,
            3 => FenceCall::Hold,
            _ => return Err(Error::Invalid("unknown call of a fence request")),
        };
        let [begun, number, request] = [begun, number, request].map(u64::from_le_bytes);
        Ok(Self {
            call,
            begun,
            number,
            request,
        })
    }
}

/// Calls in a row before the first pause.
const EAGER_CALLS: u32 = 4;
/// The step by which pauses between calls grow. In the first pauses a thread of the daemon goes
/// back into its line behind those that have to come before it; in the last ones a request waits
/// for the device.
const PAUSE_STEP: Duration = Duration::from_micros(20);
const PAUSE_MAX: Duration = Duration::from_millis(5);
/// Rounds without write-back that the kernel held back. The first one ends the write-back that was
/// under way before it: the kernel skips a page that is being written back, also when it was stored
/// into again. The second one has those pages too.
const CLEAN_ROUNDS: u32 = 2;
/// Rounds after which the kernel is taken not to keep up. Each round that does not count has
/// carried out more than 1,000 requests.
const ROUNDS_MAX: u32 = 1 << 16;

/// Hands all bytes that programs have stored into mapped files of the mount to the daemon, and
/// returns when the daemon has them. `dir` is an open directory of the mount.
///
/// # Errors
/// `ENOTTY` when `dir` is not on a mount of Ramet, before anything is written back; errors of the
/// write-back, as `ENOSPC`; the answer of the daemon.
pub fn write_back(dir: impl AsFd) -> io::Result<()> {
    let dir = dir.as_fd();
    let ask = |fence: Fence| {
        let mut bytes = fence.encode();
        control_ioctl(dir, FENCE, &mut bytes)?;
        Fence::decode(&bytes).map_err(io::Error::other)
    };
    let mut now = ask(Fence::LOOK)?;
    let mut clean = 0;
    for _ in 0..ROUNDS_MAX {
        rustix::fs::syncfs(dir)?;
        now = await_fence(ask, now)?;
        clean += u32::from(now.call == FenceCall::Look);
        if clean == CLEAN_ROUNDS {
            // This call reports write-back that failed since the call before.
            return Ok(rustix::fs::syncfs(dir)?);
        }
    }
    Err(io::ErrorKind::ResourceBusy.into())
}

/// Raises a fence and asks until it has passed and no write-back is held.
fn await_fence(ask: impl Fn(Fence) -> io::Result<Fence>, before: Fence) -> io::Result<Fence> {
    let mut fence = ask(Fence {
        call: FenceCall::Raise,
        ..before
    })?;
    let mut calls: u32 = 0;
    while matches!(fence.call, FenceCall::Wait | FenceCall::Hold) {
        calls = calls.saturating_add(1);
        if let Some(pauses) = calls.checked_sub(EAGER_CALLS) {
            std::thread::sleep(PAUSE_STEP.saturating_mul(pauses).min(PAUSE_MAX));
        }
        fence = ask(fence)?;
    }
    Ok(fence)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fence_lies_as_the_table_says_and_comes_back() {
        let fence = Fence {
            call: FenceCall::Wait,
            begun: 3,
            number: 0x0102,
            request: u64::MAX,
        };
        let bytes = fence.encode();
        assert_eq!(bytes[..10], [2, 0, 0, 0, 0, 0, 0, 0, 3, 0]);
        assert_eq!(bytes[16..19], [2, 1, 0]);
        assert_eq!(Fence::decode(&bytes).unwrap(), fence);
        for odd in [&bytes[..31], &[4; 32], &[0; 40], &[0; 33]] {
            assert!(Fence::decode(odd).is_err());
        }
    }

    #[test]
    fn the_wait_for_a_fence_hands_back_each_answer() {
        let answers = std::cell::RefCell::new(vec![FenceCall::Raise, FenceCall::Wait]);
        let asked = std::cell::RefCell::new(Vec::new());
        let ask = |fence: Fence| {
            asked.borrow_mut().push((fence.call, fence.number));
            let call = answers.borrow_mut().pop().unwrap();
            Ok(Fence {
                call,
                number: 7,
                ..fence
            })
        };
        let ended = await_fence(ask, Fence::LOOK).unwrap();
        assert_eq!(ended.call, FenceCall::Raise);
        assert_eq!(
            asked.into_inner(),
            [(FenceCall::Raise, 0), (FenceCall::Wait, 7)]
        );
    }
}

//! Tails that become contents at the moment.
//!
//! The *tail* of a file is the bytes behind its end, up to the end of their page. A mapping may
//! store there. A file that grows over its tail *exposes* it: the bytes count as contents from then
//! on, and every reader sees zeros there. The daemon puts those zeros into the page of the kernel
//! (`server/page_cache.rs`), after the volume has changed. The kernel may write the page back in
//! between, once it knows the new size. So a tail is noted before the volume changes and until the
//! request is answered. A page that is written back meanwhile has zeros in place of an exposed tail.
//!
//! Bytes that a program stores after the answer are contents. No page is masked from then on.
//!
//! **A clear that is late** goes on after the answer. It stores no zeros any more, but the kernel may
//! still take the size of the file from the notification. So a request that makes the file shorter
//! waits for the clear, for a while ([`Tails::wait_for_clears`]).

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use ramet_fs::Ino;

/// The tails of a mount that are exposed at the moment. There are no more than requests, and clears
/// that are late.
#[derive(Default)]
pub(crate) struct Tails {
    state: Mutex<State>,
    /// Number of entries. Requests skip the lock when it is 0.
    known: AtomicUsize,
    /// A clear has ended.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    exposed: Vec<(Ino, Range<u64>)>,
    /// The files of clears that have not ended.
    clears: Vec<Ino>,
}

impl Tails {
    fn count(&self, state: &State) {
        let known = state.exposed.len() + state.clears.len();
        self.known.store(known, Ordering::SeqCst);
    }

    /// A request is going to expose these bytes of a file. They stay exposed until the value that
    /// this answers is dropped.
    pub(crate) fn expose(self: &Arc<Self>, ino: Ino, bytes: Range<u64>) -> Exposed {
        let mut state = self.state.lock();
        state.exposed.push((ino, bytes.clone()));
        self.count(&state);
        Exposed {
            tails: Arc::clone(self),
            ino,
            bytes,
        }
    }

    /// A clear of the tail of a file begins. The clear ends when the value that this answers is
    /// dropped.
    pub(crate) fn begin_clear(self: &Arc<Self>, ino: Ino) -> Clearing {
        let mut state = self.state.lock();
        state.clears.push(ino);
        self.count(&state);
        let tails = Arc::clone(self);
        Clearing { tails, ino }
    }

    /// Waits until no clear of the file is under way, or for `patience`.
    pub(crate) fn wait_for_clears(&self, ino: Ino, patience: Duration) {
        if self.known.load(Ordering::SeqCst) == 0 {
            return;
        }
        let until = Instant::now() + patience;
        let mut state = self.state.lock();
        while state.clears.contains(&ino) {
            if self.ended.wait_until(&mut state, until).timed_out() {
                return;
            }
        }
    }

    /// The contents of a page that is written back at `offset`, with zeros in place of exposed tails.
    pub(crate) fn masked<'a>(&self, ino: Ino, offset: u64, page: &'a [u8]) -> Cow<'a, [u8]> {
        let mut page = Cow::Borrowed(page);
        if self.known.load(Ordering::SeqCst) == 0 {
            return page;
        }
        let state = self.state.lock();
        for (_, bytes) in state.exposed.iter().filter(|(of, _)| *of == ino) {
            let at = |byte: u64| {
                let within = usize::try_from(byte.saturating_sub(offset));
                within.map_or(page.len(), |within| within.min(page.len()))
            };
            let masked = at(bytes.start)..at(bytes.end);
            if !masked.is_empty() {
                page.to_mut()[masked].fill(0);
            }
        }
        page
    }
}

/// An exposed tail.
pub(crate) struct Exposed {
    tails: Arc<Tails>,
    pub(crate) ino: Ino,
    pub(crate) bytes: Range<u64>,
}

impl Drop for Exposed {
    fn drop(&mut self) {
        let mut state = self.tails.state.lock();
        let is_this = |(ino, bytes): &(Ino, Range<u64>)| *ino == self.ino && *bytes == self.bytes;
        if let Some(at) = state.exposed.iter().position(is_this) {
            state.exposed.swap_remove(at);
        }
        self.tails.count(&state);
    }
}

/// A clear that is under way.
pub(crate) struct Clearing {
    tails: Arc<Tails>,
    ino: Ino,
}

impl Drop for Clearing {
    fn drop(&mut self) {
        let mut state = self.tails.state.lock();
        if let Some(at) = state.clears.iter().position(|ino| *ino == self.ino) {
            state.clears.swap_remove(at);
        }
        self.tails.count(&state);
        self.tails.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: Ino = Ino(7);

    #[test]
    fn exposed_bytes_of_a_page_are_zeros_as_long_as_they_are_exposed() {
        let tails = Arc::<Tails>::default();
        let page = [1; 10];
        let masked = |ino, offset| tails.masked(ino, offset, &page).into_owned();
        assert!(matches!(tails.masked(FILE, 0, &page), Cow::Borrowed(_)));
        let exposed = tails.expose(FILE, 104..108);
        let twice = tails.expose(FILE, 104..108);
        assert_eq!(masked(FILE, 100), [1, 1, 1, 1, 0, 0, 0, 0, 1, 1]);
        assert_eq!(masked(FILE, 98), [1, 1, 1, 1, 1, 1, 0, 0, 0, 0]);
        assert_eq!(masked(FILE, 106), [0, 0, 1, 1, 1, 1, 1, 1, 1, 1]);
        for (ino, offset) in [(Ino(8), 100), (FILE, 94), (FILE, 108), (FILE, 1 << 40)] {
            assert!(matches!(tails.masked(ino, offset, &page), Cow::Borrowed(_)));
        }
        drop(exposed);
        assert_eq!(masked(FILE, 100)[4..8], [0; 4]);
        drop(twice);
        assert_eq!(masked(FILE, 100), page);
        assert_eq!(tails.known.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_request_waits_for_clears_of_its_file_until_they_end_or_patience_does() {
        let tails = Arc::<Tails>::default();
        let other = tails.begin_clear(Ino(8));
        let long = Duration::from_secs(20);
        let began = Instant::now();
        tails.wait_for_clears(FILE, long);
        let clearing = tails.begin_clear(FILE);
        let short = Duration::from_millis(20);
        let wait = Instant::now();
        tails.wait_for_clears(FILE, short);
        assert!(wait.elapsed() >= short);
        std::thread::scope(|threads| {
            threads.spawn(|| tails.wait_for_clears(FILE, long));
            drop(clearing);
        });
        assert!(began.elapsed() < long);
        drop(other);
        assert_eq!(tails.known.load(Ordering::SeqCst), 0);
    }
}

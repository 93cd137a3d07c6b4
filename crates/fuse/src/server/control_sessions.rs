//! Control calls with several answers.
//!
//! A comparison and a scrub are handed out in pages. Their calls have a number in common that the
//! caller chose, since a directory is opened without a request and nothing else tells the calls of
//! one command from those of another. The daemon does not hear when a command ends early. So a
//! session without calls ends after a while, and the oldest one when there are many.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use ramet_fs::ControlState;

/// Sessions of all users, at most.
const SESSIONS_MAX: usize = 32;
/// The time after the last call of a session for which the session is kept.
const KEPT: Duration = Duration::from_secs(30);

/// A user and the number that the user chose.
pub(crate) type SessionKey = (u32, u64);

struct Session {
    key: SessionKey,
    state: Arc<ControlState>,
    last_call: Instant,
}

#[derive(Default)]
struct Table {
    /// The oldest call first.
    sessions: Vec<Session>,
    /// Whether a thread waits to drop the oldest.
    is_watched: bool,
}

#[derive(Default)]
struct Shared {
    table: Mutex<Table>,
    ended: Condvar,
}

/// The sessions of a mount.
#[derive(Default)]
pub(crate) struct ControlSessions(Arc<Shared>);

impl Session {
    /// Whether no call of the session is under way.
    fn is_waiting(&self) -> bool {
        Arc::strong_count(&self.state) == 1
    }
}

impl Table {
    fn take(&mut self, key: SessionKey) -> Option<Session> {
        let at = self.sessions.iter().position(|one| one.key == key)?;
        Some(self.sessions.remove(at))
    }

    /// Drops the sessions that are too old. Answers the time until another one may be.
    fn age(&mut self, now: Instant) -> Option<Duration> {
        let left =
            |one: &Session| KEPT.saturating_sub(now.saturating_duration_since(one.last_call));
        self.sessions
            .retain(|one| !one.is_waiting() || !left(one).is_zero());
        let least = self.sessions.iter().map(left).min()?;
        // A call that is under way for long ends some time.
        Some(if least.is_zero() { KEPT } else { least })
    }
}

impl Shared {
    /// Drops sessions until there are none.
    fn watch(&self) {
        let mut table = self.table.lock();
        while let Some(left) = table.age(Instant::now()) {
            self.ended.wait_for(&mut table, left);
        }
        table.is_watched = false;
    }
}

impl ControlSessions {
    /// The state of a session that begins, or goes on; `None` if it cannot go on.
    pub(crate) fn state(&self, key: SessionKey, begins: bool) -> Option<Arc<ControlState>> {
        let mut table = self.0.table.lock();
        let before = table.take(key).map(|session| session.state);
        let state = before.or_else(|| begins.then(Arc::default))?;
        if table.sessions.len() == SESSIONS_MAX {
            let oldest = table.sessions.iter().position(Session::is_waiting)?;
            table.sessions.remove(oldest);
        }
        table.sessions.push(Session {
            key,
            state: Arc::clone(&state),
            last_call: Instant::now(),
        });
        if !table.is_watched {
            let shared = Arc::clone(&self.0);
            let thread = std::thread::Builder::new().name("sessions".to_owned());
            let watch = move || {
                // The call may be served by a thread that stays on one processor.
                ramet_sys::run_anywhere();
                shared.watch();
            };
            // Without the thread, sessions go when there are too many.
            table.is_watched = thread.spawn(watch).is_ok();
        }
        Some(state)
    }

    /// A call of a session has ended, and the session too if it is idle.
    pub(crate) fn called(&self, key: SessionKey) {
        let mut table = self.0.table.lock();
        if let Some(session) = table.take(key)
            && !session.state.is_idle()
        {
            let last_call = Instant::now();
            table.sessions.push(Session {
                last_call,
                ..session
            });
        }
        if table.sessions.is_empty() {
            self.0.ended.notify_all();
        }
    }
}

impl Drop for ControlSessions {
    fn drop(&mut self) {
        self.0.table.lock().sessions.clear();
        self.0.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn session_goes_on_for_its_user_until_it_is_idle_old_or_one_of_many() {
        let sessions = ControlSessions::default();
        assert!(sessions.state((7, 1), false).is_none(), "not begun");
        let first = sessions.state((7, 1), true).unwrap();
        assert!(sessions.state((8, 1), false).is_none());
        assert!(Arc::ptr_eq(&sessions.state((7, 1), false).unwrap(), &first));
        for number in 2..2 + SESSIONS_MAX as u64 {
            sessions.state((7, number), true).unwrap();
        }
        assert!(sessions.state((7, 2), false).is_none());
        assert!(
            sessions.state((7, 1), false).is_some(),
            "a call is under way"
        );
        drop(first);
        sessions.state((7, 50), true).unwrap();
        sessions.state((7, 51), true).unwrap();
        let last = (7, 51);
        assert!(sessions.state(last, false).is_some());
        sessions.called(last);
        assert!(
            sessions.state(last, false).is_none(),
            "it has no more pages"
        );
        let mut table = sessions.0.table.lock();
        let now = Instant::now();
        assert!(table.age(now).is_some());
        assert_eq!(table.age(now + KEPT), None);
        assert!(table.sessions.is_empty());
    }

    #[test]
    fn thread_ends_with_the_last_session() {
        let sessions = ControlSessions::default();
        sessions.state((7, 1), true).unwrap();
        let shared = Arc::downgrade(&sessions.0);
        drop(sessions);
        while shared.upgrade().is_some() {
            std::thread::yield_now();
        }
    }
}

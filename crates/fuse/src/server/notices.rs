//! Notifications that a change waits for.
//!
//! A notification of a name or of a listing waits for locks of the kernel. Their holder may read a
//! directory into memory that is a page of another file system, which never answers. So several
//! threads send notifications, and a change waits for its own for [`PATIENCE`] only. Then the kernel
//! is told without locks: it looks all names up again, and reads each directory anew when a program
//! opens it. The notification still comes when the lock is free. The changes of one user have a part
//! of the threads only, so that a user that holds locks makes nobody else wait.

use std::sync::mpsc::channel;
use std::time::Duration;

use ramet_fs::Invalidation;

use crate::cache::notify::Kernel;
use crate::server::workers::Workers;

/// Notifications that wait for locks at the same time.
const THREADS: usize = 16;
/// The same for the changes of one user.
const OF_USER: usize = 4;
/// How long a change waits for its notifications.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

/// See the module header.
pub(crate) struct Notices {
    kernel: Kernel,
    workers: Workers,
}

impl Notices {
    /// # Errors
    /// The system has no more threads.
    pub(crate) fn new(kernel: Kernel) -> std::io::Result<Self> {
        Ok(Self {
            kernel,
            workers: Workers::shared("notify", THREADS, OF_USER)?,
        })
    }

    /// Sends notifications of a change by `user`, if one is known, on another thread, which then runs
    /// `told`.
    pub(crate) fn send(
        &self,
        user: Option<u32>,
        stale: Vec<Invalidation>,
        told: impl FnOnce() + Send + 'static,
    ) {
        let kernel = self.kernel.clone();
        self.workers.run_of(user, move || {
            kernel.invalidate(&stale);
            told();
        });
    }

    /// Sends notifications of a change by the `user`, and waits until the kernel has them or patience
    /// ends. The user is looked up if the notifications wait for locks.
    pub(crate) fn send_and_wait(&self, user: impl FnOnce() -> u32, stale: Vec<Invalidation>) {
        if stale.iter().all(Invalidation::is_of_attributes) {
            return self.kernel.invalidate_attributes(&stale);
        }
        let (sender, told) = channel();
        self.send(Some(user()), stale.clone(), move || {
            // The receiver is gone if all names were invalidated instead.
            let _ = sender.send(());
        });
        if told.recv_timeout(PATIENCE).is_err() {
            self.send_at_once(&stale);
        }
    }

    /// Tells the kernel of a change whose program is going to hear of a failure. The kernel may hold
    /// locks for that program, so only the notifications without locks are sent at once.
    pub(crate) fn send_before_error(&self, stale: &[Invalidation]) {
        self.send_at_once(stale);
        if !stale.iter().all(Invalidation::is_of_attributes) {
            self.send(None, stale.to_vec(), || {});
        }
    }

    /// Has the kernel look all names up again, and tells it of stale attributes. Both wait for no
    /// lock.
    pub(crate) fn send_at_once(&self, stale: &[Invalidation]) {
        self.kernel.invalidate_names();
        self.kernel.invalidate_attributes(stale);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use ramet_fs::ROOT_INO;

    use super::*;

    #[test]
    fn change_goes_on_although_its_notification_waits() {
        let kernel = Kernel::default();
        // A pipe that is full holds its writer up, as a lock of the kernel does.
        let (full, to_kernel) = std::io::pipe().unwrap();
        rustix::io::write(&to_kernel, &vec![0; 1 << 16]).unwrap();
        kernel.connect(Arc::new(to_kernel.into()));
        let notices = Notices::new(kernel).unwrap();
        let began = Instant::now();
        let (sender, told) = channel();
        let stale = Invalidation::Listing(ROOT_INO);
        notices.send(None, vec![stale], move || sender.send(()).unwrap());
        assert!(told.recv_timeout(PATIENCE).is_err());
        assert!(began.elapsed() < 10 * PATIENCE);
        drop(full);
        told.recv().unwrap();
    }
}

//! A measure of usage and a scrub hold no checkpoint up while they read the device.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use parking_lot::Mutex;
use ramet_betree::{Batch, FormatOptions, OpenOptions, Span, Tree, TreeShape};
use ramet_block::{Device, MemDevice};

/// How long a checkpoint may take, which is done in a moment.
const PATIENCE: Duration = Duration::from_secs(5);

type Hook = Box<dyn FnOnce() + Send>;

/// A device that calls a hook within one of its reads.
struct Hooked {
    device: MemDevice,
    /// Reads before the hook, and the hook.
    hook: Mutex<Option<(u64, Hook)>>,
}

impl Device for Hooked {
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        let due = {
            let mut hook = self.hook.lock();
            match &mut *hook {
                Some((0, _)) => hook.take(),
                Some((left, _)) => {
                    *left -= 1;
                    None
                }
                None => None,
            }
        };
        if let Some((_, hook)) = due {
            hook();
        }
        self.device.read_at(addr, buf)
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.device.write_at(addr, buf)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.device.discard(addr, len_bytes)
    }
}

/// A volume of many nodes, opened with nothing in its caches.
fn opened() -> (Arc<Hooked>, Tree) {
    let shape = TreeShape {
        leaf_bytes: 4096,
        block_bytes: 1024,
        fanout: 4,
        buffer_bytes: 8 << 10,
        memory_bytes: 8 << 10,
        ..TreeShape::default()
    };
    let hooked = Arc::new(Hooked {
        device: MemDevice::new(32 << 20),
        hook: Mutex::new(None),
    });
    let dev: Arc<dyn Device> = hooked.clone();
    let format = FormatOptions {
        shape: Some(shape.clone()),
        ..FormatOptions::default()
    };
    Tree::format(&dev, &format).expect("formats");
    let open = OpenOptions {
        shape: Some(shape),
        manual: true,
        cache_bytes: Some(1 << 20),
        ..OpenOptions::default()
    };
    let tree = Tree::open(dev.clone(), open.clone()).expect("opens");
    for part in 0..100 {
        let mut batch = Batch::new();
        for n in 0..50 {
            batch.put(format!("src/{:05}", part * 50 + n), vec![part as u8; 60]);
        }
        tree.apply(batch).expect("there is room");
    }
    let mut batch = Batch::new();
    batch.clone_prefix("src/", "copy/");
    tree.apply(batch).expect("there is room");
    tree.close().expect("closes");
    let tree = Tree::open(dev, open).expect("opens");
    (hooked, tree)
}

/// Does `work` while another thread writes a checkpoint within its read number `at`; whether that
/// was done before the read went on.
fn checkpoint_within<T>(
    hooked: &Hooked,
    tree: &Tree,
    at: u64,
    work: impl FnOnce(&Tree) -> T,
) -> (T, Option<bool>) {
    let (other, (done, is_done)) = (tree.clone(), channel());
    let (told, is_told) = channel();
    let hook = move || {
        std::thread::spawn(move || {
            let mut batch = Batch::new();
            batch.put("other", "change");
            let written = other.apply(batch).and_then(|_| other.checkpoint());
            let _ = done.send(written.is_ok());
        });
        let _ = told.send(is_done.recv_timeout(PATIENCE).unwrap_or(false));
    };
    *hooked.hook.lock() = Some((at, Box::new(hook)));
    let result = work(tree);
    *hooked.hook.lock() = None;
    (result, is_told.try_recv().ok())
}

#[test]
fn checkpoint_does_not_wait_for_a_measure_of_usage() {
    let measure = |tree: &Tree| tree.usage(&[Span::prefix("copy/")]).expect("reads");
    let expected = measure(&opened().1);
    let mut hooks = 0;
    for at in [2, 5, 9, 14, 20] {
        let (hooked, tree) = opened();
        let (usage, checkpointed) = checkpoint_within(&hooked, &tree, at, measure);
        assert_eq!(usage, expected);
        assert_ne!(checkpointed, Some(false), "read {at}: a checkpoint waits");
        hooks += u64::from(checkpointed.is_some());
        assert_eq!(
            tree.verify(&mut |_| {}).expect("reads"),
            Vec::<String>::new()
        );
    }
    assert!(hooks >= 3, "{hooks} reads only");
}

#[test]
fn checkpoint_does_not_wait_for_a_scrub() {
    let scrub = |tree: &Tree| {
        let mut scrub = tree.scrub();
        let mut found = Vec::new();
        while !scrub.is_done() {
            found.extend(scrub.step(1 << 20).expect("reads"));
        }
        found.len()
    };
    let mut hooks = 0;
    // Behind the superblocks.
    for at in [6, 9, 14, 20, 30] {
        let (hooked, tree) = opened();
        let (found, checkpointed) = checkpoint_within(&hooked, &tree, at, scrub);
        assert_eq!(found, 0);
        assert_ne!(checkpointed, Some(false), "read {at}: a checkpoint waits");
        hooks += u64::from(checkpointed.is_some());
        assert_eq!(
            tree.verify(&mut |_| {}).expect("reads"),
            Vec::<String>::new()
        );
    }
    assert!(hooks >= 3, "{hooks} reads only");
}

//! A tree that is shut down on request.

use std::sync::Arc;

use ramet_betree::{Batch, Error, FormatOptions, OpenOptions, SHUT_DOWN, Tree, shut_down};
use ramet_block::{Device, MemDevice};

fn put(tree: &Tree, key: &'static str) -> ramet_betree::Result<u64> {
    let mut batch = Batch::new();
    batch.put(key, "value");
    tree.apply(batch)
}

#[test]
fn tree_that_is_shut_down_writes_nothing_more_and_keeps_what_was_synced() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
    Tree::format(&device, &FormatOptions::default()).unwrap();
    let open = || {
        let options = OpenOptions {
            manual: true,
            ..OpenOptions::default()
        };
        Tree::open(Arc::clone(&device), options).unwrap()
    };
    let tree = open();
    put(&tree, "synced").unwrap();
    tree.sync().unwrap();
    put(&tree, "not synced").unwrap();
    shut_down(&tree);
    assert!(matches!(put(&tree, "late"), Err(Error::Poisoned(_))));
    assert!(matches!(tree.sync(), Err(Error::Poisoned(_))));
    assert!(matches!(tree.checkpoint(), Err(Error::Poisoned(_))));
    assert_eq!(tree.stats().poisoned.as_deref(), Some(SHUT_DOWN));
    tree.close().unwrap();
    drop(tree);
    let tree = open();
    assert!(tree.get(b"synced").unwrap().is_some());
    assert!(tree.get(b"not synced").unwrap().is_none());
    tree.close().unwrap();
}

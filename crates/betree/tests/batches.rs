//! The changes of a batch happen in order.

use std::sync::Arc;

use ramet_betree::{Batch, FormatOptions, OpenOptions, Tree, successor_of_prefix};
use ramet_block::{Device, MemDevice};

#[test]
fn clones_of_a_batch_see_what_comes_before_them() {
    let dev: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
    Tree::format(&dev, &FormatOptions::default()).expect("formats");
    let options = OpenOptions {
        manual: true,
        ..OpenOptions::default()
    };
    let tree = Tree::open(dev, options).expect("opens");
    // More than a clone copies.
    let mut batch = Batch::new();
    for number in 0..1000u32 {
        batch.put([b"a", &number.to_be_bytes()[..]].concat(), vec![1; 100]);
    }
    tree.apply(batch).expect("there is room");
    tree.checkpoint().expect("there is room");

    let key = |prefix: &[u8]| [prefix, b"extra"].concat();
    let mut batch = Batch::new();
    batch.put(key(b"a"), "new");
    batch.clone_prefix("a", "b");
    batch.clone_prefix("b", "c");
    batch.delete(key(b"b"));
    batch.clone_prefix("b", "d");
    batch.delete_prefix("a");
    batch.clone_prefix("a", "e");
    batch.clone_prefix("d", "d2");
    // Nothing of the batch touches the source of this one before.
    batch.clone_prefix("z", "f");
    tree.apply(batch).expect("there is room");

    let get = |prefix: &[u8]| tree.get(&key(prefix)).expect("reads");
    assert_eq!(get(b"c").as_deref(), Some(&b"new"[..]));
    assert_eq!((get(b"b"), get(b"d")), (None, None));
    let count = |prefix: &[u8]| {
        let end = successor_of_prefix(prefix);
        tree.scan(prefix, end.as_deref()).count()
    };
    let counts = [b"a", b"b", b"c", b"e", b"f"].map(|prefix| count(prefix));
    assert_eq!(counts, [0, 1000, 1001, 0, 0]);
    // A copy of a range into itself is of the state before.
    assert_eq!((count(b"d"), count(b"d2")), (2000, 1000));
    assert!(tree.verify(&mut |_| {}).expect("reads").is_empty());
}

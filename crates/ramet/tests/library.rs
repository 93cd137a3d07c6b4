//! The public interface of the library.

use std::sync::Arc;

use ramet::{Batch, Codec, Device, Error, MemDevice, OpenError, Options, Span, VOLUME_BYTES_MIN};

#[test]
fn a_store_survives_being_closed_and_is_one_process_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    let store = Options::default().create(&path, 16 << 20).unwrap();
    let mut batch = Batch::new();
    batch.put("k", "v");
    store.apply(batch).unwrap();
    let again = Options::default().open(&path);
    assert!(matches!(again, Err(OpenError::Device(_))));
    store.close().unwrap();
    drop(store);
    let over = Options::default().create(&path, 16 << 20);
    assert!(
        matches!(over, Err(OpenError::Device(_))),
        "a store is not made over a file"
    );

    let read_only = Options {
        read_only: true,
        ..Options::default()
    };
    let (one, two) = (
        read_only.open(&path).unwrap(),
        read_only.open(&path).unwrap(),
    );
    for store in [one, two] {
        assert_eq!(store.get(b"k").unwrap().as_deref(), Some(&b"v"[..]));
        let mut batch = Batch::new();
        batch.delete("k");
        assert!(matches!(store.apply(batch), Err(Error::ReadOnly)));
    }
}

#[test]
fn a_store_that_is_dropped_keeps_every_change_without_sync_or_close() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
    let mut store = Options::default().create_on(Arc::clone(&device)).unwrap();
    for round in 0..20u32 {
        let mut batch = Batch::new();
        batch.put("round", round.to_string());
        batch.clone_prefix("round", format!("copy {round}"));
        store.apply(batch).unwrap();
        let other = store.clone();
        drop(store);
        // Another handle keeps the store open.
        assert!(other.get(b"round").unwrap().is_some());
        drop(other);
        store = Options::default().open_on(Arc::clone(&device)).unwrap();
        let found = store.get(b"round").unwrap();
        assert_eq!(found.as_deref(), Some(round.to_string().as_bytes()));
        let copies = store.scan(b"copy", Some(b"d")).count();
        assert_eq!(copies, usize::try_from(round).unwrap() + 1);
    }
}

#[test]
fn compression_saves_space_and_may_change_from_open_to_open() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
    let line =
        |n: u32| format!("the {n}th line is much like every other line of this table; ").repeat(8);
    let mut taken = Vec::new();
    let codecs = [Codec::Raw, Codec::Lz4, Codec::Zstd(Default::default())];
    for (table, codec) in codecs.into_iter().enumerate() {
        let options = Options {
            compression: Some(codec),
            ..Options::default()
        };
        let store = if table == 0 {
            options.create_on(device.clone()).unwrap()
        } else {
            options.open_on(device.clone()).unwrap()
        };
        for chunk in 0..20u32 {
            let mut batch = Batch::new();
            for n in chunk * 1000..(chunk + 1) * 1000 {
                batch.put(format!("{table}/{n:08}"), line(n));
            }
            store.apply(batch).unwrap();
        }
        let usage = store.usage(&[Span::prefix(format!("{table}/"))]).unwrap();
        taken.push(usage.exclusive_bytes + usage.shared_bytes);
        store.close().unwrap();
    }
    println!("{taken:?} bytes with {codecs:?}");
    assert!(taken[1] * 3 < taken[0] && taken[2] < taken[1]);
    let store = Options::default().open_on(device).unwrap();
    for table in 0..3 {
        for n in [0, 7, 19_999] {
            let found = store.get(format!("{table}/{n:08}").as_bytes()).unwrap();
            assert_eq!(found.as_deref(), Some(line(n).as_bytes()));
        }
    }
    assert_eq!(store.verify(&mut |_| {}).unwrap(), Vec::<String>::new());
}

#[test]
fn a_store_that_would_be_too_small_is_refused_with_the_least_size_and_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    for bytes in [0, 4096, VOLUME_BYTES_MIN - 4096] {
        let refused = Options::default().create(&path, bytes).err().unwrap();
        let said = refused.to_string();
        assert!(said.contains("at least 4 MiB"), "{said}");
        assert!(!path.exists());
    }
    Options::default().create(&path, VOLUME_BYTES_MIN).unwrap();
}

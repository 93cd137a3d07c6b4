//! `ramet du`: the space of a directory tree.

use serde_json::json;

use crate::args::Du;
use crate::control::{Root, mounted};
use crate::failure::{Failure, Outcome};
use crate::size::Size;

pub fn run(args: &Du) -> Outcome {
    let root = Root::open_dir(&args.dir).map_err(|e| Failure::system(&args.dir, e))?;
    let usage = root.usage().map_err(|e| mounted(&args.dir, e))?;
    let fields = [
        ("logical", usage.logical_bytes),
        ("shared", usage.shared_bytes),
        ("exclusive", usage.exclusive_bytes),
    ];
    if args.json {
        let all = json!({
            "logical_bytes": usage.logical_bytes,
            "shared_bytes": usage.shared_bytes,
            "exclusive_bytes": usage.exclusive_bytes,
        });
        println!("{all:#}");
        return Ok(());
    }
    for (name, bytes) in fields {
        println!("{name:<20} {} ({bytes})", Size::new(bytes));
    }
    Ok(())
}

//! `ramet bench` at a tiny scale: it runs to its end, tells its counts, and leaves nothing behind.

use ramet_e2e::{ramet_bin, run, run_ok};
use serde_json::Value;

fn median(report: &Value, peer: &str, name: &str) -> f64 {
    let figures = report["figures"].as_array().expect("a list");
    let found = figures
        .iter()
        .find(|figure| figure["peer"] == peer && figure["name"] == name)
        .unwrap_or_else(|| panic!("no `{name}` of {peer}"));
    found["values"][0].as_f64().expect("a number")
}

#[test]
fn experiments_run_side_by_side_and_count_their_costs() {
    let out = tempfile::tempdir().expect("a folder can be made");
    let dir = out.path().to_str().expect("temporary paths are UTF-8");
    let mut args = vec!["bench", "fs", "--scale", "0.004", "--rounds", "3", "--json"];
    args.extend(["--experiments", "E1,E2,E4,E10,ops", "--peers", "ramet,ext4"]);
    args.extend(["--images", dir, "--out", dir]);
    let told = run_ok(ramet_bin(), &args);
    let report: Value = serde_json::from_str(&told).expect("--json prints JSON");

    let space = "space per byte written in a clone";
    assert!(median(&report, "ramet", space) * 10.0 < median(&report, "ext4", space));
    let space = "(tail,tail) space per round";
    assert!(median(&report, "ramet", space) * 4.0 < median(&report, "ext4", space));
    let reads = "random 4-byte writes, device reads each";
    assert_eq!(median(&report, "ramet", reads), 0.0, "writes are blind");
    let writes = "4 KiB write + fdatasync: device writes each";
    assert!((1.0..2.5).contains(&median(&report, "ramet", writes)));
    let requests = "create of 200 B: all";
    assert!((4.0..7.0).contains(&median(&report, "ramet", requests)));
    let requests = "stat, warm: all";
    assert!(
        median(&report, "ramet", requests) < 0.2,
        "the kernel remembers"
    );

    let left: Vec<_> = std::fs::read_dir(dir)
        .expect("it is there")
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with("ramet-bench-"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
    let devices = run_ok("losetup", &["--list", "--noheadings"]);
    assert!(!devices.contains(dir), "{devices}");
    for name in [
        "report.md",
        "e1-caw-figures-1-9-space-per-byte-written-in-a-clone.svg",
    ] {
        assert!(out.path().join(name).exists(), "{name}");
    }

    let report = out.path().join("report.json");
    let report = report.to_str().expect("temporary paths are UTF-8");
    let same = run_ok(ramet_bin(), &["bench", "compare", report, report]);
    assert!(same.ends_with("0 shown\n"), "{same}");
}

#[test]
fn figures_from_before_a_failure_are_kept() {
    let out = tempfile::tempdir().expect("a folder can be made");
    let dir = out.path().to_str().expect("temporary paths are UTF-8");
    let mut args = vec!["bench", "fs", "--scale", "0.004", "--experiments", "E1,E9"];
    args.extend(["--peers", "ramet", "--profiles", "raw", "--images", dir]);
    // E9 copies the root of a container.
    args.extend(["--root", "/nonexistent", "--out", dir]);
    let ended = run(ramet_bin(), &args);
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(!ended.status.success(), "{said}");
    assert!(
        said.contains("/nonexistent") && said.contains("report.json"),
        "{said}"
    );
    let report = std::fs::read_to_string(out.path().join("report.json")).expect("it is written");
    let report: Value = serde_json::from_str(&report).expect("it is JSON");
    assert!(median(&report, "ramet", "space per byte written in a clone") > 0.0);
    assert!(
        report["left_out"].to_string().contains("/nonexistent"),
        "{report}"
    );
    assert!(report["commands"].to_string().contains("E1,E9"), "{report}");
}

#[test]
fn bench_runs_the_program_beside_it_and_names_it_when_it_is_missing() {
    let help = run_ok(ramet_bin(), &["bench", "--help"]);
    assert!(
        help.contains("ramet-bench") && help.contains("compare"),
        "{help}"
    );
    let alone = tempfile::tempdir().expect("a folder can be made");
    let copy = alone.path().join("ramet");
    std::fs::copy(ramet_bin(), &copy).expect("there is room");
    let out = std::process::Command::new(&copy)
        .args(["bench", "fs"])
        .env("PATH", alone.path())
        .output()
        .expect("the command runs");
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains("cargo install ramet-bench"), "{said}");
}

#[test]
fn impossible_measurements_are_refused_with_a_reason() {
    let refused = run(ramet_bin(), &["bench", "fs", "--experiments", "E99"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("E99"), "{said}");
    let refused = run(ramet_bin(), &["bench", "fs", "--scale", "0"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("--scale"), "{said}");
}

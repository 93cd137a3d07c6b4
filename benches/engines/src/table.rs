//! Figures of several engines side by side.

use std::path::PathBuf;

use serde_json::Value;

use crate::Outcome;

/// What a row shows of a phase.
enum Show {
    PerSecond,
    Seconds,
    Micros,
    ReadsPerOp,
}

const ROWS: [(&str, &str, Show); 21] = [
    ("random inserts, 1/s", "insert", Show::PerSecond),
    ("settling after them, s", "settle", Show::Seconds),
    ("get, hot, us", "get_hot", Show::Micros),
    ("get, uniform, us", "get_uniform", Show::Micros),
    ("get, missing, us", "get_missing", Show::Micros),
    ("get, cold, first ones, us", "get_cold_first", Show::Micros),
    ("- device reads each", "get_cold_first", Show::ReadsPerOp),
    ("get, cold, further ones, us", "get_cold_next", Show::Micros),
    ("- device reads each", "get_cold_next", Show::ReadsPerOp),
    ("get, cold, missing, us", "get_cold_missing", Show::Micros),
    ("- device reads each", "get_cold_missing", Show::ReadsPerOp),
    ("scan of 100, us", "scan_100", Show::Micros),
    ("scan of 100, cold, us", "scan_100_cold", Show::Micros),
    ("- device reads each", "scan_100_cold", Show::ReadsPerOp),
    ("scan of everything, keys/s", "scan_all", Show::PerSecond),
    ("- cold, keys/s", "scan_all_cold", Show::PerSecond),
    ("clone of 1/256, us", "clone_part", Show::Micros),
    ("clone of everything, us", "clone_all", Show::Micros),
    (
        "delete a tenth in ranges, us each",
        "delete_ranges",
        Show::Micros,
    ),
    ("settling after that, s", "delete_settle", Show::Seconds),
    ("scan after that, keys/s", "scan_after", Show::PerSecond),
];

fn cell(figures: &Value, phase: &str, show: &Show) -> Option<String> {
    let phase = figures.get(phase)?;
    let number = |name: &str| phase.get(name).and_then(Value::as_f64);
    let (ops, seconds) = (number("ops")?, number("seconds")?);
    Some(match show {
        Show::PerSecond => format!("{:.0}", ops / seconds),
        Show::Seconds => format!("{seconds:.2}"),
        Show::Micros => format!("{:.1}", seconds * 1e6 / ops),
        Show::ReadsPerOp => format!("{:.2}", number("device_reads")? / ops),
    })
}

fn row(title: &str, cells: impl Iterator<Item = Option<String>>) {
    let cells: Vec<String> = cells
        .map(|cell| cell.unwrap_or_else(|| "-".into()))
        .collect();
    println!("| {title} | {} |", cells.join(" | "));
}

pub fn print(files: &[PathBuf]) -> Outcome<()> {
    let mut all = Vec::new();
    for file in files {
        all.push(serde_json::from_str::<Value>(&std::fs::read_to_string(
            file,
        )?)?);
    }
    let text = |figures: &Value| figures["settings"]["engine"].as_str().map(str::to_owned);
    row("", all.iter().map(text));
    row("---", all.iter().map(|_| Some("---:".to_owned())));
    let over = |figures: &Value, above: f64| {
        let user = figures["user_bytes"].as_f64()?;
        Some(format!("{:.2}", above / user))
    };
    row(
        "device bytes written per byte inserted",
        all.iter().map(|f| over(f, f["written_bytes"].as_f64()?)),
    );
    row(
        "space per byte inserted",
        all.iter().map(|f| over(f, f["space_bytes"].as_f64()?)),
    );
    row(
        "processor time of the inserts, s",
        all.iter()
            .map(|f| Some(format!("{:.1}", f["insert"]["cpu_seconds"].as_f64()?))),
    );
    for (title, phase, show) in &ROWS {
        row(title, all.iter().map(|figures| cell(figures, phase, show)));
    }
    let digests: Vec<&Value> = all
        .iter()
        .map(|figures| &figures["scan_all_found"])
        .collect();
    if digests.windows(2).any(|pair| pair[0] != pair[1]) {
        return Err("the engines do not hold the same".into());
    }
    Ok(())
}

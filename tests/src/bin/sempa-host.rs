//! Runs the outer or the inner first process of a testbed host; started by the testbed.
//!
//! `sempa-host testbed COUNT` makes a testbed for manual use: it prints the folder of the testbed
//! and the first processes of its hosts, and keeps the testbed until standard input closes.

use std::path::Path;

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [_, "outer", plan] => sempa_tests::hosts::run_outer_process(Path::new(plan)),
        [_, "init", plan] => sempa_tests::hosts::run_init_process(Path::new(plan)),
        [_, "testbed", count] => {
            let bed = sempa_tests::Testbed::new(
                count.parse()?,
                sempa_tests::prefix().ok().as_deref(),
                &[],
            )?;
            let hosts: Vec<String> = bed
                .hosts()
                .iter()
                .map(|host| format!("{}={}", host.name(), host.init_pid()))
                .collect();
            println!("{} {}", bed.folder().display(), hosts.join(" "));
            std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
            Ok(())
        }
        _ => anyhow::bail!("sempa-host is started by the testbed, with a plan"),
    }
}

//! Runs the outer or the inner first process of a testbed host. The testbed starts this program.
//!
//! `sempa-host testbed COUNT` makes a testbed for manual use: it prints the folder of the testbed
//! and the first processes of its hosts. The testbed ends when standard input is closed.

use std::path::Path;

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [_, "outer", plan] => sempa_tests::hosts::run_outer_process(Path::new(plan)),
        [_, "init", plan] => sempa_tests::hosts::run_init_process(Path::new(plan)),
        [_, "testbed", count] => {
            let testbed = sempa_tests::Testbed::new(
                count.parse()?,
                sempa_tests::installed_prefix().ok().as_deref(),
                &[],
            )?;
            let host_lines: Vec<String> = testbed
                .hosts()
                .iter()
                .map(|host| format!("{}={}", host.name(), host.init_pid()))
                .collect();
            println!("{} {}", testbed.folder().display(), host_lines.join(" "));
            std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
            Ok(())
        }
        _ => anyhow::bail!("sempa-host is started by the testbed, with a plan"),
    }
}

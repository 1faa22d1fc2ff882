//! An owner agent for tests: it directs the guests of its host on behalf of the owner, like a load
//! watcher.
//!
//! Each line of standard input is a directive: `stop WHY`, `kill MS WHY` or `welcome WHY`. The
//! program passes the directive to the daemon and prints `done MICROS`, the time just before it did
//! so.

#![allow(clippy::print_stdout)] // It is a program, and this is what it says.

use libpvm::Vm;
use sempa_proto::Micros;
use sempa_proto::load::GuestLimits;
use sempa_proto::owner::{EvictionMode, GuestAccess, GuestDirective};
use std::time::{SystemTime, UNIX_EPOCH};

fn now_since_1970() -> Micros {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("after 1970");
    Micros(u64::try_from(since.as_micros()).expect("before the year 500000"))
}

fn parse_directive(line: &str) -> Option<GuestDirective> {
    let (what, rest) = line.split_once(' ')?;
    let stopped = |leave_at, then, why: &str| {
        (
            GuestAccess::Paused {
                evict_at: leave_at,
                eviction: then,
            },
            why.to_string(),
        )
    };
    let (guests, why) = match what {
        "stop" => stopped(None, EvictionMode::Move, rest),
        "kill" => {
            let (ms, why) = rest.split_once(' ')?;
            stopped(
                Some(now_since_1970() + Micros::from_millis(ms.parse().ok()?)),
                EvictionMode::Kill,
                why,
            )
        }
        "welcome" => (GuestAccess::Welcome, rest.to_string()),
        _ => return None,
    };
    Some(GuestDirective {
        access: guests,
        reason: why,
        limits: GuestLimits::default(),
    })
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let vm = Vm::enroll()?;
    println!("ready");
    for line in std::io::stdin().lines() {
        let line = line?;
        let word = parse_directive(&line).ok_or(format!("this is no word: {line}"))?;
        let at = now_since_1970();
        vm.set_guest_directive(word)?;
        println!("done {}", at.0);
    }
    Ok(vm.exit()?)
}

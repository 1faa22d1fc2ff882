//! Formats the output of commands for people, in the columns of PVM. Pure.

use sempa_proto::engine::Engine;
use sempa_proto::event::{Event, EventKind};
use sempa_proto::migration::MigrationTargets;
use sempa_proto::table::{
    AddedHost, HostTable, TASK_CONNECTED, TASK_FORKED, TASK_HOSTER, TASK_RM, TASK_TASKER, TaskInfo,
};
use sempa_proto::task::{MailboxClass, MigrationReport};
use sempa_proto::{HostId, Micros, PvmError, Tid};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Letters of the task flags, in the order of their bits.
const FLAG_LETTERS: [(i32, char); 8] = [
    (TASK_CONNECTED, 'c'),
    (TASK_FORKED, 'f'),
    (8, 'a'),
    (16, 'o'),
    (32, 's'),
    (TASK_HOSTER, 'H'),
    (TASK_RM, 'R'),
    (TASK_TASKER, 'T'),
];

/// Appends a formatted line; writing to a string cannot fail.
macro_rules! put {
    ($out:expr, $($arg:tt)*) => {
        writeln!($out, $($arg)*).expect("a string takes everything")
    };
}

fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}

/// Formats the output of `conf`.
pub(crate) fn conf(table: &HostTable) -> String {
    let (hosts, formats) = (table.hosts.len(), table.data_format_count());
    let mut out = format!(
        "{hosts} host{}, {formats} data format{}\n",
        plural(hosts),
        plural(formats)
    );
    put!(
        out,
        "{:>24} {:>8} {:>8}{:>8}       DSIG",
        "HOST",
        "DTID",
        "ARCH",
        "SPEED"
    );
    for host in &table.hosts {
        put!(
            out,
            "{:>24} {:>8x} {:>8}{:>8} 0x{:08x}",
            host.name,
            host.id.tid(),
            host.arch,
            host.speed,
            host.dsig
        );
    }
    out
}

/// Formats the announcement of hosts that others have added.
pub(crate) fn new_hosts(table: &HostTable, added: &[HostId]) -> String {
    let mut out = format!(
        "\nConsole: {} new host{} added\n",
        added.len(),
        plural(added.len())
    );
    put!(
        out,
        "{:>24} {:>8} {:>8}{:>8}",
        "HOST",
        "DTID",
        "ARCH",
        "SPEED"
    );
    for host in added.iter().filter_map(|id| table.get(*id)) {
        put!(
            out,
            "{:>24} {:>8x} {:>8}{:>8}",
            host.name,
            host.id.tid(),
            host.arch,
            host.speed
        );
    }
    out
}

/// Returns the name of the host in a host-file line.
pub(crate) fn host_of_line(line: &str) -> &str {
    line.split_whitespace().next().unwrap_or(line)
}

/// Formats the output of `add`.
pub(crate) fn added(lines: &[String], results: &[AddedHost]) -> String {
    let mut out = format!(
        "{} successful\n",
        results.iter().filter(|added| added.result.is_ok()).count()
    );
    put!(out, "{:>24} {:>8}", "HOST", "DTID");
    for (line, added) in lines.iter().zip(results) {
        match &added.result {
            Ok(host) => put!(out, "{:>24} {:>8x}", host.name, host.id.tid()),
            Err(error) => put!(out, "{line:>24} {error:>8}", error = error.text()),
        }
    }
    out
}

/// Formats the output of `delete`.
pub(crate) fn deleted(names: &[String], results: &[Result<(), PvmError>]) -> String {
    let mut out = format!(
        "{} successful\n",
        results.iter().filter(|result| result.is_ok()).count()
    );
    put!(out, "{:>24}  STATUS", "HOST");
    for (name, result) in names.iter().zip(results) {
        put!(
            out,
            "{name:>24}  {}",
            result.map_or_else(PvmError::text, |()| "deleted")
        );
    }
    out
}

/// Formats the output of `spawn` after the job's number.
pub(crate) fn spawned(results: &[Result<Tid, PvmError>]) -> String {
    let mut out = format!(
        "{} successful\n",
        results.iter().filter(|result| result.is_ok()).count()
    );
    for result in results {
        match result {
            Ok(tid) => put!(out, "{tid}"),
            Err(error) => put!(out, "{error}"),
        }
    }
    out
}

/// Formats one line of `mstat`.
pub(crate) fn mstat(name: &str, status: Result<(), PvmError>) -> String {
    format!(
        "{name:>24}  {}\n",
        status.map_or_else(PvmError::text, |()| "ok")
    )
}

/// Formats one line of `pstat`.
pub(crate) fn pstat(tid: Tid, status: Result<(), PvmError>) -> String {
    format!(
        "t{tid:>8x}  {}\n",
        status.map_or_else(PvmError::text, |()| "run")
    )
}

/// Returns the header of task tables.
pub(crate) fn ps_header(long: bool) -> String {
    let ids = if long {
        format!(" {:>8} {:>6}", "PTID", "PID")
    } else {
        String::new()
    };
    format!(
        "{:>24} {:>8}{ids} {:>9} COMMAND\n",
        "HOST", "TID", "FLAG 0x"
    )
}

/// Formats one row of a task table. `console` is the console's own tid.
pub(crate) fn ps_row(table: &HostTable, task: &TaskInfo, console: Tid, long: bool) -> String {
    let host = table
        .get(task.host)
        .map_or_else(|| task.host.to_string(), |host| host.name.clone());
    let mut out = if task.tid == console {
        format!("{host:>24}   (cons)")
    } else {
        format!("{host:>24} {:>8x}", task.tid)
    };
    if long {
        let parent = if task.parent == Tid::NONE {
            "-".to_string()
        } else {
            format!("{:x}", task.parent)
        };
        write!(out, " {parent:>8} {:>6}", task.pid).expect("a string takes everything");
    }
    let name = if task.name.is_empty() {
        "-"
    } else {
        &task.name
    };
    // Not in PVM: stopped while the owner of its host is present, or suspended until it is resumed.
    let state = match (task.paused, task.suspended) {
        (false, false) => "",
        (true, false) => " (stopped)",
        (false, true) => " (suspended)",
        (true, true) => " (stopped, suspended)",
    };
    put!(out, " {:>9} {name:<12}{state}", flags(task.flags));
    out
}

/// Formats the output of `ps` for tasks sorted by host and tid.
pub(crate) fn ps(table: &HostTable, tasks: &[TaskInfo], console: Tid, long: bool) -> String {
    let mut out = ps_header(long);
    tasks
        .iter()
        .for_each(|task| out.push_str(&ps_row(table, task, console, long)));
    out
}

/// Formats task flags as a hexadecimal number and letters, such as `6/c,f`.
fn flags(flags: i32) -> String {
    let mut out = format!("{flags:x}/");
    let letters = FLAG_LETTERS.iter().filter(|(bit, _)| flags & bit != 0);
    for (at, (_, letter)) in letters.enumerate() {
        if at > 0 {
            out.push(',');
        }
        out.push(*letter);
    }
    out
}

/// Formats the output of `names`.
pub(crate) fn names(classes: &[MailboxClass]) -> String {
    let mut out = String::new();
    for class in classes {
        put!(out, "<{}>:", class.name);
        for (index, owner, flags) in &class.entries {
            put!(
                out,
                "\tindex={index} owner=0x{owner:x}/{} flags=0x{flags:x}",
                owner.raw()
            );
        }
        out.push('\n');
    }
    out
}

/// Formats the numbers of a reply to `tickle`.
pub(crate) fn tickle(numbers: &[i32]) -> String {
    let list: String = numbers.iter().map(|number| format!(" {number}")).collect();
    format!("({list} )\n")
}

/// Formats the output of `can-migrate`.
pub(crate) fn survey(table: &HostTable, survey: &MigrationTargets) -> String {
    let name = |host: HostId| {
        table
            .get(host)
            .map_or_else(|| host.to_string(), |entry| entry.name.clone())
    };
    let width = survey
        .verdicts
        .iter()
        .map(|(host, _)| name(*host).len())
        .max()
        .unwrap_or(0);
    let mut out = format!(
        "{} is on {}, {} KiB\n",
        survey.tid,
        name(survey.from),
        survey.resident_bytes.div_ceil(1024)
    );
    for (host, verdict) in &survey.verdicts {
        let engine = survey.engine(*host);
        let host = name(*host);
        match verdict.split_first() {
            None if engine == Engine::Criu => put!(out, "{host:width$}  yes"),
            None => put!(out, "{host:width$}  yes, by {engine}"),
            Some((first, rest)) => {
                put!(out, "{host:width$}  no: {first}");
                rest.iter()
                    .for_each(|refusal| put!(out, "{:width$}      {refusal}", ""));
            }
        }
    }
    match survey.nearest() {
        Some(host) => put!(out, "the nearest host that would take it: {}", name(host)),
        None if survey.verdicts.is_empty() => put!(out, "no other host was asked about"),
        None => put!(out, "no host would take it"),
    }
    out
}

/// Formats the output of a successful `migrate`.
pub(crate) fn migrated(tid: Tid, to: &str, report: &MigrationReport) -> String {
    let ms = (report.frozen.0 + 500) / 1000;
    match report.engine {
        Engine::Criu => format!(
            "{tid} moved to {to}: {} bytes, frozen {ms} ms\n",
            report.bytes
        ),
        engine => format!("{tid} moved to {to} by {engine}: away {ms} ms\n"),
    }
}

/// Names of hosts, including those that have left.
#[derive(Clone, Debug, Default)]
pub(crate) struct HostNames(BTreeMap<HostId, String>);

impl HostNames {
    /// Adds the names of a host table.
    pub(crate) fn learn_table(&mut self, table: &HostTable) {
        self.0
            .extend(table.hosts.iter().map(|host| (host.id, host.name.clone())));
    }

    /// Adds the name that an event contains, if any.
    pub(crate) fn learn_event(&mut self, event: &Event) {
        if let EventKind::HostAdded { host, name } | EventKind::HostGone { host, name, .. } =
            &event.kind
        {
            self.0.insert(*host, name.clone());
        }
    }

    /// Returns the name of a host, if it is known.
    pub(crate) fn get(&self, host: HostId) -> Option<&str> {
        self.0.get(&host).map(String::as_str)
    }
}

/// Formats one event: time, host, text.
pub(crate) fn event(names: &HostNames, event: &Event) -> String {
    let host = names
        .get(event.host)
        .map_or_else(|| event.host.to_string(), str::to_string);
    format!(
        "{} {host} {}\n",
        time(event.at),
        event.kind.with_host_names(|host| names.get(host))
    )
}

/// A date and a time of day in UTC.
struct CivilTime {
    year: u64,
    /// Counts from 1 to 12.
    month: u64,
    /// Counts from 1 to 31.
    day: u64,
    second: u64,
    /// Days since the last Sunday.
    weekday: usize,
}

impl CivilTime {
    fn new(at: Micros) -> CivilTime {
        let seconds = at.0 / 1_000_000;
        let (days, second) = (seconds / 86_400, seconds % 86_400);
        // Converts days since 1970 to a civil date, in 400-year eras that begin on 1 March.
        let shifted = days + 719_468;
        let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let march_month = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * march_month + 2) / 5 + 1;
        let month = if march_month < 10 {
            march_month + 3
        } else {
            march_month - 9
        };
        let year = era * 400 + year_of_era + u64::from(month <= 2);
        // 1 January 1970 was a Thursday.
        CivilTime {
            year,
            month,
            day,
            second,
            weekday: ((days + 4) % 7) as usize,
        }
    }

    fn time(&self) -> String {
        format!(
            "{:02}:{:02}:{:02}",
            self.second / 3600,
            self.second / 60 % 60,
            self.second % 60
        )
    }
}

/// Formats a time in UTC with milliseconds, such as `2026-11-21T09:34:01.123Z`.
pub(crate) fn time(at: Micros) -> String {
    let civil = CivilTime::new(at);
    let CivilTime {
        year, month, day, ..
    } = civil;
    format!(
        "{year:04}-{month:02}-{day:02}T{}.{:03}Z",
        civil.time(),
        at.0 / 1000 % 1000
    )
}

/// Formats a time in UTC as C's `ctime` does, such as `Sat Nov 21 09:34:01 2026`.
pub(crate) fn ctime(at: Micros) -> String {
    const DAYS: [&str; 7] = ["Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"];
    const MONTHS: [&str; 12] = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let civil = CivilTime::new(at);
    let (weekday, month) = (DAYS[civil.weekday], MONTHS[civil.month as usize - 1]);
    format!(
        "{weekday} {month} {:2} {} {}",
        civil.day,
        civil.time(),
        civil.year
    )
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use sempa_proto::Epoch;
    use sempa_proto::migration::{Failure, MigrationCause, Step};
    use sempa_proto::table::HostEntry;

    pub(crate) fn host(index: u16, name: &str) -> HostEntry {
        HostEntry {
            id: HostId::new(index).expect("an index"),
            name: name.into(),
            arch: "LINUX64".into(),
            speed: 1000,
            dsig: 0x0040_8c41,
            addresses: Vec::new(),
        }
    }

    pub(crate) fn table() -> HostTable {
        HostTable {
            epoch: Epoch(3),
            hosts: vec![host(1, "ha1"), host(2, "ha2"), host(3, "ha3")],
        }
    }

    pub(crate) fn host_names() -> HostNames {
        let mut names = HostNames::default();
        names.learn_table(&table());
        names
    }

    pub(crate) fn task(tid: i32, parent: i32, pid: i32, flags: i32, name: &str) -> TaskInfo {
        let tid = Tid::from_raw(tid);
        let host = tid.birth_host().expect("a task's tid");
        let parent = Tid::from_raw(parent);
        TaskInfo {
            tid,
            parent,
            host,
            flags,
            name: name.into(),
            pid,
            uid: 0,
            migrating: false,
            paused: false,
            suspended: false,
        }
    }

    /// `conf` has the columns of PVM.
    #[test]
    fn conf_layout_matches_pvm() {
        let expected = "\
3 hosts, 1 data format
                    HOST     DTID     ARCH   SPEED       DSIG
                     ha1    40000  LINUX64    1000 0x00408c41
                     ha2    80000  LINUX64    1000 0x00408c41
                     ha3    c0000  LINUX64    1000 0x00408c41
";
        assert_eq!(conf(&table()), expected);
        let mut two = table();
        two.hosts.truncate(1);
        two.hosts[0].dsig = 1;
        assert!(conf(&two).starts_with("1 host, 1 data format\n"));
    }

    /// `add` and `delete` have the columns of PVM.
    #[test]
    fn add_and_delete_layouts_match_pvm() {
        let lines: Vec<String> = ["ha2 sp=2000", "ha3", "nohost"].map(String::from).to_vec();
        let ok = |index, name| AddedHost {
            result: Ok(host(index, name)),
            reason: String::new(),
        };
        let failed = AddedHost {
            result: Err(PvmError::NoHost),
            reason: "no such name".into(),
        };
        let expected = "\
2 successful
                    HOST     DTID
                     ha2    80000
                     ha3    c0000
                  nohost No such host
";
        assert_eq!(
            added(&lines, &[ok(2, "ha2"), ok(3, "ha3"), failed]),
            expected
        );
        let names: Vec<String> = ["ha3", "nohost"].map(String::from).to_vec();
        let expected = "\
1 successful
                    HOST  STATUS
                     ha3  deleted
                  nohost  No such host
";
        assert_eq!(deleted(&names, &[Ok(()), Err(PvmError::NoHost)]), expected);
    }

    /// `ps` has the columns of PVM.
    #[test]
    fn ps_layout_matches_pvm() {
        let console = Tid::from_raw(0x40001);
        let tasks = [
            task(0x40001, 0, 11690, 4, ""),
            task(0x40004, -35, 16853, 6, "/opt/t/sleeper"),
            task(0xc0003, 0x40004, 16854, 0x104, "rm"),
        ];
        let expected = "                    HOST      TID   FLAG 0x COMMAND
                     ha1   (cons)       4/c -           
                     ha1    40004     6/c,f /opt/t/sleeper
                     ha3    c0003   104/c,R rm          
";
        assert_eq!(ps(&table(), &tasks, console, false), expected);
        let expected = "                    HOST      TID     PTID    PID   FLAG 0x COMMAND
                     ha1   (cons)        -  11690       4/c -           
                     ha1    40004 ffffffdd  16853     6/c,f /opt/t/sleeper
                     ha3    c0003    40004  16854   104/c,R rm          
";
        assert_eq!(ps(&table(), &tasks, console, true), expected);
    }

    /// `spawn`, `mstat`, `pstat` and `names` have the layouts of PVM.
    #[test]
    fn status_layouts_match_pvm() {
        let results = [Ok(Tid::from_raw(0x80001)), Err(PvmError::NoFile)];
        assert_eq!(spawned(&results), "1 successful\nt80001\nNo such file\n");
        assert_eq!(mstat("ha2", Ok(())), "                     ha2  ok\n");
        assert_eq!(
            mstat("nohost", Err(PvmError::NoHost)),
            "                  nohost  No such host\n"
        );
        assert_eq!(pstat(Tid::from_raw(0x40001), Ok(())), "t   40001  run\n");
        assert_eq!(
            pstat(Tid::from_raw(0x80002), Err(PvmError::NoTask)),
            "t   80002  No such task\n"
        );
        let entries = vec![(0, Tid::from_raw(0x40001), 2)];
        let class = MailboxClass {
            name: "###_PVM_NO_RESET_###".into(),
            entries,
        };
        assert_eq!(
            names(&[class]),
            "<###_PVM_NO_RESET_###>:\n\tindex=0 owner=0x40001/262145 flags=0x2\n\n"
        );
        let two = [HostId::new(2).expect("2"), HostId::new(3).expect("3")];
        let expected = "
Console: 2 new hosts added
                    HOST     DTID     ARCH   SPEED
                     ha2    80000  LINUX64    1000
                     ha3    c0000  LINUX64    1000
";
        assert_eq!(new_hosts(&table(), &two), expected);
    }

    /// A migration and an event take one line each.
    #[test]
    fn migrations_and_events_are_one_line() {
        let id = sempa_proto::MigrationId(1);
        let report = MigrationReport {
            id,
            bytes: 1234,
            frozen: Micros(98_400),
            engine: Engine::Criu,
        };
        assert_eq!(
            migrated(Tid::from_raw(0x40002), "h3", &report),
            "t40002 moved to h3: 1234 bytes, frozen 98 ms\n"
        );
        let report = MigrationReport {
            bytes: 0,
            engine: Engine::Restart { timeout_s: 5 },
            ..report
        };
        assert_eq!(
            migrated(Tid::from_raw(0x40002), "h3", &report),
            "t40002 moved to h3 by restart: away 98 ms\n"
        );
        let (from, to) = (HostId::MASTER, HostId::new(3).expect("3"));
        let kind = EventKind::MigrationFailed {
            id: sempa_proto::MigrationId(4),
            tid: Tid::from_raw(0x40002),
            from,
            to,
            cause: MigrationCause::Requested {
                requested_by: Tid::from_raw(0x40001),
            },
            step: Step::Dump,
            why: Failure::Killed { signal: 9 },
        };
        let happened = Event {
            number: 7,
            at: Micros(1_795_253_641_123_456),
            host: from,
            kind,
        };
        assert_eq!(
            event(&host_names(), &happened),
            "2026-11-21T09:34:01.123Z ha1 m4: t40002 was not migrated from ha1 to ha3 (requested by t40001): dump failed: \
             the engine was killed by signal 9\n"
        );
    }

    /// A host that has left keeps its name in the log.
    #[test]
    fn departed_host_keeps_name_in_log() {
        let id = HostId::new(7).expect("7");
        let gone = EventKind::HostGone {
            host: id,
            name: "h7".into(),
            why: "deleted".into(),
        };
        let before = Event {
            number: 1,
            at: Micros(0),
            host: id,
            kind: EventKind::HostVacated { host: id },
        };
        let mut names = host_names();
        assert!(event(&names, &before).starts_with("1970-01-01T00:00:00.000Z host 7 "));
        names.learn_event(&Event {
            number: 2,
            at: Micros(0),
            host: HostId::MASTER,
            kind: gone,
        });
        assert!(event(&names, &before).starts_with("1970-01-01T00:00:00.000Z h7 "));
    }

    /// Times are formatted as civil dates.
    #[test]
    fn times_are_civil_dates() {
        assert_eq!(time(Micros(0)), "1970-01-01T00:00:00.000Z");
        assert_eq!(
            time(Micros(951_782_400_000_000)),
            "2000-02-29T00:00:00.000Z"
        );
        assert_eq!(
            time(Micros(1_735_689_599_999_999)),
            "2024-12-31T23:59:59.999Z"
        );
        assert_eq!(ctime(Micros(0)), "Thu Jan  1 00:00:00 1970");
        assert_eq!(
            ctime(Micros(1_735_689_599_999_999)),
            "Tue Dec 31 23:59:59 2024"
        );
        assert_eq!(
            ctime(Micros(1_795_275_167_412_550)),
            "Sat Nov 21 15:32:47 2026"
        );
    }
}

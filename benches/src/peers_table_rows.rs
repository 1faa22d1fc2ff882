//! Defines the rows of the table of `bench peers`: how each row is measured, and the goals for
//! Sempa.

/// The virtual machine on which a measurement runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum VmSetup {
    OneHost,
    TwoHosts,
    /// One host. Sempa's virtual machine has a resource manager.
    OneHostWithRm,
}

/// Unit in which the table shows a time or a rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Unit {
    Micros,
    Millis,
    /// Millions of messages per second, computed from the time per message.
    MillionsPerSecond,
    /// Gigabytes per second, computed from the time of a round trip. The value is the number of
    /// bytes in each direction.
    RoundTripGigabytesPerSecond(f64),
    /// Megabytes per second, computed from the time of one message. The value is the number of
    /// bytes of the message.
    MegabytesPerSecond(f64),
}

impl Unit {
    /// Converts a time in microseconds to this unit.
    pub(crate) fn convert_us(self, us: f64) -> f64 {
        match self {
            Self::Micros => us,
            Self::Millis => us / 1e3,
            Self::MillionsPerSecond => 1.0 / us,
            Self::RoundTripGigabytesPerSecond(bytes) => 2.0 * bytes / us / 1e3,
            Self::MegabytesPerSecond(bytes) => bytes / us,
        }
    }

    /// Returns the symbol of the unit.
    pub(crate) fn symbol(self) -> &'static str {
        match self {
            Self::Micros => "us",
            Self::Millis => "ms",
            Self::MillionsPerSecond => "M/s",
            Self::RoundTripGigabytesPerSecond(_) => "GB/s",
            Self::MegabytesPerSecond(_) => "MB/s",
        }
    }

    /// True for units of time, false for rates. For times the table also shows the 99th percentile.
    pub(crate) fn is_time(self) -> bool {
        matches!(self, Self::Micros | Self::Millis)
    }
}

/// The goals of a row for Sempa. `None` means that the row has no such goal.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RowGoals {
    /// Upper bound of a time, or lower bound of a rate, in the unit of the row.
    pub(crate) bound: Option<f64>,
    /// Upper bound of the ratio of Sempa's time to PVM's time.
    pub(crate) pvm_ratio_max: Option<f64>,
    /// Upper bound of the ratio of Sempa's time to another time of Sempa in the same run, and the
    /// name of this other time.
    pub(crate) own_ratio_max: Option<(f64, &'static str)>,
}

const NO_GOAL: RowGoals = RowGoals {
    bound: None,
    pvm_ratio_max: None,
    own_ratio_max: None,
};

const fn bound_goal(value: f64) -> RowGoals {
    RowGoals {
        bound: Some(value),
        ..NO_GOAL
    }
}

const NOT_SLOWER_THAN_PVM: RowGoals = RowGoals {
    pvm_ratio_max: Some(1.0),
    ..NO_GOAL
};

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    /// Name by which `--only` selects the row.
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    /// Name of the time from which the row is computed, as the program prints it.
    pub(crate) time_name: &'static str,
    pub(crate) unit: Unit,
    pub(crate) goal: RowGoals,
}

/// The steps of one run of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MeasurementKind {
    /// Runs the measuring program.
    Program,
    /// Measures ssh logins without PVM, then runs the measuring program, which adds hosts. The
    /// daemons of the added hosts must have ended before the next measurement.
    Login,
}

/// A measurement that runs once per system and repetition. Several rows may be computed from the
/// output of one measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measurement {
    pub(crate) setup: VmSetup,
    pub(crate) kind: MeasurementKind,
    /// Arguments of the measuring program.
    pub(crate) args: &'static [&'static str],
    /// Number of times that one run of the program measures.
    pub(crate) round_count: usize,
    /// Number of processes of the corresponding MPI program; 0 if the measurement has no MPI
    /// program.
    pub(crate) mpi_ranks: usize,
    /// True if there are more processes than cores. MPI must then be configured so that waiting
    /// processes yield.
    pub(crate) is_oversubscribed: bool,
    pub(crate) rows: &'static [Row],
}

const BYTES_PER_MIB: f64 = 1_048_576.0;

const fn make_row(
    name: &'static str,
    title: &'static str,
    time_name: &'static str,
    unit: Unit,
    goal: RowGoals,
) -> Row {
    Row {
        name,
        title,
        time_name,
        unit,
        goal,
    }
}

const fn one_host_measurement(
    args: &'static [&'static str],
    round_count: usize,
    mpi_ranks: usize,
    rows: &'static [Row],
) -> Measurement {
    Measurement {
        setup: VmSetup::OneHost,
        kind: MeasurementKind::Program,
        args,
        round_count,
        mpi_ranks,
        is_oversubscribed: false,
        rows,
    }
}

const fn two_hosts_measurement(
    args: &'static [&'static str],
    round_count: usize,
    mpi_ranks: usize,
    rows: &'static [Row],
) -> Measurement {
    Measurement {
        setup: VmSetup::TwoHosts,
        ..one_host_measurement(args, round_count, mpi_ranks, rows)
    }
}

const SHARED_CORE_GOAL: RowGoals = RowGoals {
    bound: Some(12.0),
    pvm_ratio_max: Some(1.0),
    own_ratio_max: None,
};
const LOGIN_GOAL: RowGoals = RowGoals {
    own_ratio_max: Some((1.15, "ssh")),
    ..NO_GOAL
};
const MULTICAST_GOAL: RowGoals = RowGoals {
    own_ratio_max: Some((2.0, "send_call")),
    ..NO_GOAL
};

/// All measurements, in the order of the table.
pub(crate) const MEASUREMENTS: &[Measurement] = &[
    one_host_measurement(
        &["rtt", "size=8", "cores=0,1"],
        5000,
        2,
        &[make_row(
            "rtt8",
            "round trip 8 B, same host, a core each",
            "rtt",
            Unit::Micros,
            bound_goal(1.0),
        )],
    ),
    one_host_measurement(
        &["rtt", "size=8", "cores=0,1", "direct=1"],
        5000,
        0,
        &[make_row(
            "rtt8-direct",
            "  the same, PvmRouteDirect",
            "rtt",
            Unit::Micros,
            bound_goal(1.0),
        )],
    ),
    Measurement {
        is_oversubscribed: true,
        ..one_host_measurement(
            &["rtt", "size=8", "cores=0,0"],
            3000,
            2,
            &[make_row(
                "shared8",
                "round trip 8 B, same host, one core for both",
                "rtt",
                Unit::Micros,
                SHARED_CORE_GOAL,
            )],
        )
    },
    Measurement {
        is_oversubscribed: true,
        ..one_host_measurement(
            &["rtt", "size=8", "cores=0,0", "direct=1"],
            3000,
            0,
            &[make_row(
                "shared8-direct",
                "  the same, PvmRouteDirect",
                "rtt",
                Unit::Micros,
                SHARED_CORE_GOAL,
            )],
        )
    },
    Measurement {
        is_oversubscribed: true,
        ..one_host_measurement(
            &["ring", "size=8", "tasks=32"],
            200,
            32,
            &[make_row(
                "ring32",
                "hop in a ring of 32 tasks, 8 B",
                "hop",
                Unit::Micros,
                NOT_SLOWER_THAN_PVM,
            )],
        )
    },
    Measurement {
        is_oversubscribed: true,
        ..one_host_measurement(
            &["ring", "size=8", "tasks=32", "direct=1"],
            200,
            0,
            &[make_row(
                "ring32-direct",
                "  the same, PvmRouteDirect",
                "hop",
                Unit::Micros,
                NOT_SLOWER_THAN_PVM,
            )],
        )
    },
    one_host_measurement(
        &["one_way", "size=64", "batch=10000", "cores=0,1"],
        10,
        2,
        &[make_row(
            "rate64",
            "64 B one way, same host",
            "message",
            Unit::MillionsPerSecond,
            bound_goal(2.0),
        )],
    ),
    one_host_measurement(
        &["one_way", "size=64", "batch=10000", "cores=0,1", "direct=1"],
        10,
        0,
        &[make_row(
            "rate64-direct",
            "  the same, PvmRouteDirect",
            "message",
            Unit::MillionsPerSecond,
            bound_goal(2.0),
        )],
    ),
    one_host_measurement(
        &["rtt", "size=1048576", "cores=0,1"],
        200,
        2,
        &[
            make_row(
                "rtt1m",
                "round trip 1 MiB, same host",
                "rtt",
                Unit::RoundTripGigabytesPerSecond(BYTES_PER_MIB),
                bound_goal(5.0),
            ),
            make_row(
                "copy1m",
                "  beside it: one copy in memory",
                "copy",
                Unit::Micros,
                NO_GOAL,
            ),
        ],
    ),
    one_host_measurement(
        &["rtt", "size=1048576", "cores=0,1", "direct=1"],
        200,
        0,
        &[
            make_row(
                "rtt1m-direct",
                "  the same, PvmRouteDirect",
                "rtt",
                Unit::RoundTripGigabytesPerSecond(BYTES_PER_MIB),
                bound_goal(5.0),
            ),
            make_row(
                "copy1m-direct",
                "  beside it: one copy in memory",
                "copy",
                Unit::Micros,
                NO_GOAL,
            ),
        ],
    ),
    one_host_measurement(
        &["rtt", "size=16777216", "cores=0,1"],
        20,
        2,
        &[make_row(
            "rtt16m",
            "round trip 16 MiB, same host",
            "rtt",
            Unit::RoundTripGigabytesPerSecond(16.0 * BYTES_PER_MIB),
            bound_goal(6.7),
        )],
    ),
    one_host_measurement(
        &["rtt", "size=16777216", "cores=0,1", "way=1"],
        20,
        2,
        &[make_row(
            "rtt16m-psend",
            "  the same, pvm_psend and pvm_precv",
            "rtt",
            Unit::RoundTripGigabytesPerSecond(16.0 * BYTES_PER_MIB),
            bound_goal(6.7),
        )],
    ),
    one_host_measurement(
        &["rtt", "size=16777216", "cores=0,1", "way=2"],
        20,
        2,
        &[make_row(
            "rtt16m-inplace",
            "  the same, packed in place",
            "rtt",
            Unit::RoundTripGigabytesPerSecond(16.0 * BYTES_PER_MIB),
            bound_goal(6.7),
        )],
    ),
    one_host_measurement(
        &["rtt", "size=16777216", "cores=0,1", "direct=1"],
        20,
        0,
        &[make_row(
            "rtt16m-direct",
            "  the same, PvmRouteDirect",
            "rtt",
            Unit::RoundTripGigabytesPerSecond(16.0 * BYTES_PER_MIB),
            bound_goal(3.0),
        )],
    ),
    one_host_measurement(
        &["mcast", "size=1048576", "tasks=8"],
        40,
        9,
        &[
            make_row(
                "mcast-call",
                "mcast of 1 MiB to 8 tasks, the call",
                "mcast_call",
                Unit::Millis,
                MULTICAST_GOAL,
            ),
            make_row(
                "send-call",
                "  beside it: the call of one send",
                "send_call",
                Unit::Millis,
                NO_GOAL,
            ),
            make_row(
                "mcast-all",
                "  until all 8 have it",
                "mcast_all",
                Unit::Millis,
                NO_GOAL,
            ),
            make_row(
                "send-all",
                "  beside it: one send until it is there",
                "send_all",
                Unit::Millis,
                NO_GOAL,
            ),
        ],
    ),
    two_hosts_measurement(
        &["rtt", "size=8", "host=h2"],
        2000,
        2,
        &[make_row(
            "remote8",
            "round trip 8 B, other host",
            "rtt",
            Unit::Micros,
            NOT_SLOWER_THAN_PVM,
        )],
    ),
    two_hosts_measurement(
        &["rtt", "size=8", "host=h2", "direct=1"],
        2000,
        0,
        &[make_row(
            "remote8-direct",
            "  the same, PvmRouteDirect",
            "rtt",
            Unit::Micros,
            NOT_SLOWER_THAN_PVM,
        )],
    ),
    two_hosts_measurement(
        &["rtt", "size=8", "host=h2", "direct=2"],
        2000,
        0,
        &[make_row(
            "remote8-daemons",
            "  the same, PvmDontRoute",
            "rtt",
            Unit::Micros,
            NO_GOAL,
        )],
    ),
    two_hosts_measurement(
        &["one_way", "size=1048576", "batch=50", "host=h2"],
        5,
        2,
        &[make_row(
            "stream",
            "stream of 1 MiB messages, other host",
            "message",
            Unit::MegabytesPerSecond(BYTES_PER_MIB),
            bound_goal(600.0),
        )],
    ),
    two_hosts_measurement(
        &["one_way", "size=1048576", "batch=50", "host=h2", "direct=1"],
        5,
        0,
        &[make_row(
            "stream-direct",
            "  the same, PvmRouteDirect",
            "message",
            Unit::MegabytesPerSecond(BYTES_PER_MIB),
            bound_goal(800.0),
        )],
    ),
    two_hosts_measurement(
        &["one_way", "size=1048576", "batch=50", "host=h2", "direct=2"],
        5,
        0,
        &[make_row(
            "stream-daemons",
            "  the same, PvmDontRoute",
            "message",
            Unit::MegabytesPerSecond(BYTES_PER_MIB),
            NO_GOAL,
        )],
    ),
    Measurement {
        setup: VmSetup::OneHostWithRm,
        ..one_host_measurement(
            &["spawn", "tasks=1", "host=h1"],
            40,
            0,
            &[
                make_row(
                    "spawn-call",
                    "spawn of one task, the call (ours with RM)",
                    "call",
                    Unit::Millis,
                    bound_goal(1.0),
                ),
                make_row(
                    "spawn-first",
                    "  to its first message",
                    "first",
                    Unit::Millis,
                    bound_goal(2.0),
                ),
            ],
        )
    },
    Measurement {
        setup: VmSetup::OneHostWithRm,
        ..one_host_measurement(
            &["spawn", "tasks=32", "host=h1"],
            6,
            0,
            &[make_row(
                "spawn32",
                "32 spawned until all are up (ours with RM)",
                "all",
                Unit::Millis,
                bound_goal(35.0),
            )],
        )
    },
    Measurement {
        kind: MeasurementKind::Login,
        ..one_host_measurement(
            &["add_hosts", "host=h2"],
            1,
            0,
            &[
                make_row(
                    "addhosts1",
                    "pvm_addhosts of 1 host over ssh",
                    "call",
                    Unit::Millis,
                    LOGIN_GOAL,
                ),
                make_row(
                    "ssh1",
                    "  beside it: one bare ssh",
                    "ssh",
                    Unit::Millis,
                    NO_GOAL,
                ),
                make_row(
                    "ssh1-x25519",
                    "  beside it: one bare ssh, its keys by X25519",
                    "ssh_x25519",
                    Unit::Millis,
                    NO_GOAL,
                ),
            ],
        )
    },
    Measurement {
        kind: MeasurementKind::Login,
        ..one_host_measurement(
            &["add_hosts", "host=h2,h3,h4"],
            1,
            0,
            &[
                make_row(
                    "addhosts3",
                    "pvm_addhosts of 3 hosts over ssh",
                    "call",
                    Unit::Millis,
                    LOGIN_GOAL,
                ),
                make_row(
                    "ssh3",
                    "  beside it: one bare ssh",
                    "ssh",
                    Unit::Millis,
                    NO_GOAL,
                ),
                make_row(
                    "ssh3-all",
                    "  beside it: 3 bare ssh at the same time",
                    "ssh_all",
                    Unit::Millis,
                    NO_GOAL,
                ),
                make_row(
                    "ssh3-x25519",
                    "  beside it: these 3, their keys by X25519",
                    "ssh_all_x25519",
                    Unit::Millis,
                    NO_GOAL,
                ),
            ],
        )
    },
    one_host_measurement(&["packing", "batch=1000"], 300, 0, PACKING_ROWS),
];

/// Rows for packing and unpacking with PVM's calls. Only the libraries are measured.
const PACKING_ROWS: &[Row] = &[
    make_row(
        "pack-byte",
        "pack 1,000 bytes, raw",
        "pack_byte_raw",
        Unit::Micros,
        NO_GOAL,
    ),
    make_row(
        "unpack-byte",
        "  unpack them",
        "unpack_byte_raw",
        Unit::Micros,
        NO_GOAL,
    ),
    make_row(
        "pack-int",
        "pack 1,000 ints, raw",
        "pack_int_raw",
        Unit::Micros,
        NO_GOAL,
    ),
    make_row(
        "unpack-int",
        "  unpack them",
        "unpack_int_raw",
        Unit::Micros,
        NO_GOAL,
    ),
    make_row(
        "pack-int-xdr",
        "pack 1,000 ints, default encoding",
        "pack_int_xdr",
        Unit::Micros,
        NO_GOAL,
    ),
    make_row(
        "unpack-int-xdr",
        "  unpack them",
        "unpack_int_xdr",
        Unit::Micros,
        NO_GOAL,
    ),
    make_row(
        "pack-double",
        "pack 1,000 doubles, raw",
        "pack_double_raw",
        Unit::Micros,
        NO_GOAL,
    ),
    make_row(
        "unpack-double",
        "  unpack them",
        "unpack_double_raw",
        Unit::Micros,
        NO_GOAL,
    ),
    make_row(
        "pack-double-xdr",
        "pack 1,000 doubles, default encoding",
        "pack_double_xdr",
        Unit::Micros,
        NO_GOAL,
    ),
    make_row(
        "unpack-double-xdr",
        "  unpack them",
        "unpack_double_xdr",
        Unit::Micros,
        NO_GOAL,
    ),
    make_row(
        "pack-str",
        "pack a string of 999 characters",
        "pack_str_xdr",
        Unit::Micros,
        NO_GOAL,
    ),
    make_row(
        "unpack-str",
        "  unpack it",
        "unpack_str_xdr",
        Unit::Micros,
        NO_GOAL,
    ),
];

/// Returns the names of all rows, in the order of the table.
pub(crate) fn row_names() -> Vec<&'static str> {
    MEASUREMENTS
        .iter()
        .flat_map(|measurement| measurement.rows)
        .map(|row| row.name)
        .collect()
}

/// True if a pattern in `patterns` matches the name, or if there are no patterns. A final `*` in a
/// pattern matches any suffix.
pub(crate) fn is_selected(name: &str, patterns: &[String]) -> bool {
    let matches = |pattern: &String| match pattern.strip_suffix('*') {
        Some(prefix) => name.starts_with(prefix),
        None => name == pattern,
    };
    patterns.is_empty() || patterns.iter().any(matches)
}

/// Returns each measurement that has a row whose name matches one of `patterns`; all measurements
/// if `patterns` is empty.
pub(crate) fn select_measurements(patterns: &[String]) -> Vec<Measurement> {
    let has_selected_row = |measurement: &&Measurement| {
        let mut rows = measurement.rows.iter();
        rows.any(|row| is_selected(row.name, patterns))
    };
    MEASUREMENTS
        .iter()
        .filter(has_selected_row)
        .copied()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each row name is unique and selects only the measurement of its row. A final `*` selects
    /// several measurements.
    #[test]
    fn row_names_are_unique() {
        let names = row_names();
        for name in &names {
            assert_eq!(
                names.iter().filter(|other| other == &name).count(),
                1,
                "{name} is there twice"
            );
            let measurements = select_measurements(&[(*name).to_string()]);
            assert_eq!(measurements.len(), 1);
            assert!(measurements[0].rows.iter().any(|row| row.name == *name));
        }
        assert_eq!(select_measurements(&["rtt8*".to_string()]).len(), 2);
        assert!(select_measurements(&["nothing".to_string()]).is_empty());
    }

    #[test]
    fn rates_are_inverse_to_times() {
        assert_eq!(Unit::MillionsPerSecond.convert_us(0.5), 2.0);
        assert_eq!(Unit::MegabytesPerSecond(1e6).convert_us(1e4), 100.0);
        assert_eq!(Unit::RoundTripGigabytesPerSecond(1e6).convert_us(1e3), 2.0);
        assert_eq!(Unit::Millis.convert_us(1500.0), 1.5);
    }
}

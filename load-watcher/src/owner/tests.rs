//! Unit tests and properties of the owner verdict.

use super::*;
use proptest::prelude::*;

const IDLE_AFTER: Micros = Micros::from_secs(15 * 60);

fn login(user: &str, terminal: &str, login_at_s: u64) -> Login {
    Login {
        user_name: user.into(),
        terminal: terminal.into(),
        origin: "h9".into(),
        at: Micros::from_secs(login_at_s),
    }
}

/// The signs of one test case. By default there are only login records, and all other sources are
/// unavailable.
#[derive(Debug)]
struct SignsFixture {
    login_records: LoginRecords,
    sessions: Evidence<Vec<Session>>,
    logind_error: Option<String>,
    terminal_input: BTreeMap<String, Micros>,
    input_activity: Evidence<InputActivity>,
    external_load: Evidence<f32>,
    overrides: Vec<UserOverride>,
    owners: Option<Vec<String>>,
    own_user: Option<&'static str>,
}

impl SignsFixture {
    fn with_logins(logins: Vec<Login>) -> Self {
        let not_read_reason = || "not read".to_string();
        Self {
            login_records: LoginRecords::Logins(logins),
            sessions: Evidence::Unavailable(not_read_reason()),
            logind_error: Some(not_read_reason()),
            terminal_input: BTreeMap::new(),
            input_activity: Evidence::Unavailable(not_read_reason()),
            external_load: Evidence::Unavailable(not_read_reason()),
            overrides: Vec::new(),
            owners: None,
            own_user: None,
        }
    }

    fn verdict_with(&self, detector: &mut OwnerDetector, now_s: u64) -> OwnerAssessment {
        let signs = OwnerSigns {
            records_path: Path::new("/x/utmp"),
            login_records: &self.login_records,
            sessions: &self.sessions,
            logind_error: self.logind_error.as_deref(),
            terminal_input: &self.terminal_input,
            input_activity: &self.input_activity,
            external_load: &self.external_load,
            overrides: &self.overrides,
            owners: self.owners.as_deref(),
            idle_after: IDLE_AFTER,
            own_user: self.own_user,
        };
        detector.derive_verdict(Micros::from_secs(now_s), &signs)
    }

    fn verdict_at(&self, now_s: u64) -> OwnerAssessment {
        self.verdict_with(&mut OwnerDetector::default(), now_s)
    }
}

fn presence_override(
    uid: u32,
    user: &str,
    state: Presence,
    declared_at_s: u64,
    expires_at_s: u64,
) -> UserOverride {
    let presence = DeclaredPresence {
        state,
        declared_at: Micros::from_secs(declared_at_s),
        expires_at: Micros::from_secs(expires_at_s),
        ends_with_visit: true,
    };
    UserOverride {
        uid,
        user: user.into(),
        owner_override: OwnerOverride {
            presence: Some(presence),
            ..OwnerOverride::default()
        },
    }
}

/// The verdict contains the start of a visit while the visit lasts, and the end of the last visit
/// afterwards.
#[test]
fn verdict_keeps_start_and_end_of_visit() {
    let mut detector = OwnerDetector::default();
    let mut verdict_at = |now: u64, logins: Vec<Login>| {
        let assessment = SignsFixture::with_logins(logins).verdict_with(&mut detector, now);
        (assessment.verdict, assessment.reason)
    };
    assert_eq!(
        verdict_at(1, Vec::new()),
        (
            OwnerVerdict::Absent { since: None },
            "no user is logged in".into()
        )
    );
    let alice = login("alice", "pts/3", 100_000);
    let (first_verdict, reason) = verdict_at(100_001, vec![alice.clone()]);
    let expected_verdict = OwnerVerdict::Present {
        since: Micros::from_secs(100_000),
        detected_at: Micros::from_secs(100_001),
    };
    assert_eq!(first_verdict, expected_verdict);
    assert_eq!(
        reason,
        "alice is logged in on pts/3 from h9 since 03:46:40 UTC"
    );
    let (second_verdict, reason) = verdict_at(100_050, vec![alice, login("bob", "pts/4", 100_049)]);
    assert_eq!(second_verdict, expected_verdict);
    assert!(reason.ends_with(", and 1 more"));
    assert_eq!(
        verdict_at(100_060, Vec::new()).0,
        OwnerVerdict::Absent {
            since: Some(Micros::from_secs(100_060))
        }
    );
    assert_eq!(
        verdict_at(100_070, Vec::new()).0,
        OwnerVerdict::Absent {
            since: Some(Micros::from_secs(100_060))
        }
    );
}

/// Without login records the owner counts as absent, and the reason mentions the missing records.
/// If sessions are known, the confidence is higher.
#[test]
fn missing_login_records_mean_absent_with_reason() {
    let assessment = SignsFixture {
        login_records: LoginRecords::Missing,
        ..SignsFixture::with_logins(Vec::new())
    }
    .verdict_at(1);
    assert_eq!(assessment.verdict, OwnerVerdict::Absent { since: None });
    assert_eq!(
        assessment.reason,
        "no user is logged in: /x/utmp does not exist"
    );
    let denied_records = LoginRecords::Unreadable("permission denied".into());
    let assessment = SignsFixture {
        login_records: denied_records,
        ..SignsFixture::with_logins(Vec::new())
    }
    .verdict_at(1);
    assert_eq!(
        assessment.reason,
        "logins are unknown: /x/utmp cannot be read: permission denied"
    );
    assert!(assessment.confidence <= 50);
    // If systemd lists sessions, login records are not needed.
    let sessions = Evidence::Known(Vec::new());
    let assessment = SignsFixture {
        login_records: LoginRecords::Missing,
        sessions,
        ..SignsFixture::with_logins(Vec::new())
    }
    .verdict_at(1);
    assert_eq!(
        (assessment.reason.as_str(), assessment.confidence),
        ("no user is logged in", 90)
    );
}

fn screen_session(user: &str, login_at_s: u64) -> Session {
    let login = Login {
        origin: String::new(),
        ..login(user, "tty2", login_at_s)
    };
    Session {
        login,
        is_remote: false,
        has_screen: true,
        screen_use: ScreenUse::Unknown,
    }
}

#[test]
fn screen_logins_ignore_terminal_input() {
    let mut fixture = SignsFixture {
        sessions: Evidence::Known(vec![screen_session("olga", 50)]),
        ..SignsFixture::with_logins(Vec::new())
    };
    fixture
        .terminal_input
        .insert("tty2".into(), Micros::from_secs(50));
    assert!(
        matches!(
            fixture.verdict_at(90_000).verdict,
            OwnerVerdict::Present { .. }
        ),
        "nobody can tell whether she is idle"
    );
    fixture.input_activity = Evidence::Known(InputActivity {
        watched_since: Micros::from_secs(60),
        last_used: None,
    });
    assert!(matches!(
        fixture.verdict_at(90_000).verdict,
        OwnerVerdict::Uncertain { .. }
    ));
    // A display manager records a login at a screen in one of these forms.
    for (line, origin) in [("tty2", "tty2"), (":0", ":0"), ("tty2", ":0")] {
        let mut fixture = SignsFixture::with_logins(vec![Login {
            origin: origin.into(),
            ..login("olga", line, 50)
        }]);
        fixture
            .terminal_input
            .insert(line.into(), Micros::from_secs(50));
        assert!(
            matches!(
                fixture.verdict_at(90_000).verdict,
                OwnerVerdict::Present { .. }
            ),
            "{line} {origin}"
        );
        fixture.input_activity = Evidence::Known(InputActivity {
            watched_since: Micros::from_secs(60),
            last_used: Some(Micros::from_secs(89_000)),
        });
        assert!(
            matches!(
                fixture.verdict_at(91_000).verdict,
                OwnerVerdict::Uncertain { .. }
            ),
            "{line} {origin}"
        );
    }
}

/// Returns signs with one login, of Olga at a screen whose desktop reports the use `reported_use`.
/// Interrupts of keyboard and mouse cannot be observed.
fn signs_with_desktop(reported_use: ScreenUse) -> SignsFixture {
    let session = Session {
        screen_use: reported_use,
        ..screen_session("olga", 50)
    };
    SignsFixture {
        sessions: Evidence::Known(vec![session]),
        logind_error: None,
        ..SignsFixture::with_logins(Vec::new())
    }
}

#[test]
fn idle_desktop_reports_start_of_idle_time() {
    let mut detector = OwnerDetector::default();
    let fixture = signs_with_desktop(ScreenUse::IdleSince(Micros::from_secs(80_000)));
    assert!(matches!(
        fixture.verdict_with(&mut detector, 80_000 + 899).verdict,
        OwnerVerdict::Present { .. }
    ));
    let idle_assessment = fixture.verdict_with(&mut detector, 80_000 + 900);
    assert_eq!(
        idle_assessment.verdict,
        OwnerVerdict::Uncertain {
            since: Micros::from_secs(80_000)
        }
    );
    assert!(
        idle_assessment
            .sources
            .contains(&("screens".into(), "tty2 without input 900 s".into())),
        "{:?}",
        idle_assessment.sources
    );
    let active_assessment =
        signs_with_desktop(ScreenUse::InUse).verdict_with(&mut detector, 90_000);
    assert!(
        matches!(active_assessment.verdict, OwnerVerdict::Present { .. }),
        "{active_assessment:?}"
    );
    // The origin in the login record is the display. The record and the session describe the same
    // login.
    let record = Login {
        origin: ":0".into(),
        ..login("olga", ":0", 50)
    };
    let fixture = SignsFixture {
        login_records: LoginRecords::Logins(vec![record]),
        ..fixture
    };
    assert!(matches!(
        fixture.verdict_at(90_000).verdict,
        OwnerVerdict::Uncertain { .. }
    ));
}

/// A screen that is reported as in use counts as input. Observed keyboard input has priority: if
/// the last key was pressed long ago, the owner is only possibly present.
#[test]
fn observed_keys_override_screen_in_use() {
    let mut fixture = signs_with_desktop(ScreenUse::InUse);
    let key_input = |used_at| {
        Evidence::Known(InputActivity {
            watched_since: Micros::from_secs(60),
            last_used: used_at,
        })
    };
    fixture.input_activity = key_input(None);
    assert!(
        matches!(
            fixture.verdict_at(90_000).verdict,
            OwnerVerdict::Present { .. }
        ),
        "her keyboard may be another one"
    );
    fixture.input_activity = key_input(Some(Micros::from_secs(70_000)));
    assert!(
        matches!(
            fixture.verdict_at(90_000).verdict,
            OwnerVerdict::Uncertain { .. }
        ),
        "it is this one, and her desktop is never idle"
    );
}

#[test]
fn session_without_record_counts_as_present() {
    let session = screen_session("olga", 50);
    let fixture = SignsFixture {
        sessions: Evidence::Known(vec![session]),
        ..SignsFixture::with_logins(Vec::new())
    };
    let assessment = fixture.verdict_at(60);
    assert!(
        matches!(assessment.verdict, OwnerVerdict::Present { .. }),
        "{assessment:?}"
    );
    assert_eq!(
        assessment.reason,
        "olga is logged in on tty2 since 00:00:50 UTC"
    );
}

/// A login without input for a quarter of an hour means a possibly present owner; the next input
/// means a present owner.
#[test]
fn idle_login_is_maybe_until_first_key() {
    let mut fixture = SignsFixture::with_logins(vec![login("alice", "pts/3", 1000)]);
    fixture
        .terminal_input
        .insert("pts/3".into(), Micros::from_secs(2000));
    let mut detector = OwnerDetector::default();
    assert!(matches!(
        fixture.verdict_with(&mut detector, 2000 + 899).verdict,
        OwnerVerdict::Present { .. }
    ));
    let idle_assessment = fixture.verdict_with(&mut detector, 2000 + 900);
    assert_eq!(
        idle_assessment.verdict,
        OwnerVerdict::Uncertain {
            since: Micros::from_secs(2000)
        }
    );
    assert_eq!(
        idle_assessment.reason,
        "alice is logged in on pts/3 from h9, without input since 00:33:20 UTC"
    );
    assert!(
        fixture
            .verdict_with(&mut detector, 2000 + 20_000)
            .confidence
            < idle_assessment.confidence,
        "it gets less likely"
    );
    fixture
        .terminal_input
        .insert("pts/3".into(), Micros::from_secs(30_000));
    let active_assessment = fixture.verdict_with(&mut detector, 30_001);
    let (since, detected_at) = (Micros::from_secs(1000), Micros::from_secs(30_001));
    assert_eq!(
        active_assessment.verdict,
        OwnerVerdict::Present { since, detected_at }
    );
    assert_eq!(active_assessment.confidence, 99);
}

/// Without a resource manager the logins of the virtual machine's own user count for nothing, and
/// explain input at the machine. Logins of other users, and what the user declares, count.
#[test]
fn own_user_is_no_stranger() {
    let own_login = Login {
        origin: String::new(),
        ..login("alice", "tty2", 1000)
    };
    let mut fixture = SignsFixture::with_logins(vec![own_login.clone()]);
    fixture.input_activity = Evidence::Known(InputActivity {
        watched_since: Micros::from_secs(1000),
        last_used: Some(Micros::from_secs(89_990)),
    });
    let is_present = |fixture: &SignsFixture| {
        matches!(
            fixture.verdict_at(90_000).verdict,
            OwnerVerdict::Present { .. }
        )
    };
    assert!(is_present(&fixture));
    fixture.own_user = Some("alice");
    let assessment = fixture.verdict_at(90_000);
    assert!(matches!(assessment.verdict, OwnerVerdict::Absent { .. }));
    assert_eq!(
        assessment.reason,
        "only alice is logged in, whose virtual machine this is"
    );
    // A user who is logged in over the network does not use the keyboard.
    fixture.login_records = LoginRecords::Logins(vec![login("alice", "pts/3", 1000)]);
    assert!(is_present(&fixture));
    fixture.login_records = LoginRecords::Logins(vec![own_login, login("olga", "pts/4", 2000)]);
    assert!(
        fixture
            .verdict_at(90_000)
            .reason
            .starts_with("olga is logged in")
    );
    fixture.login_records = LoginRecords::Logins(vec![login("alice", "pts/3", 1000)]);
    fixture.input_activity = Evidence::Unavailable("none".into());
    fixture.overrides = vec![presence_override(
        7,
        "alice",
        Presence::Here,
        80_000,
        95_000,
    )];
    assert!(is_present(&fixture));
}

/// Input of keyboard and mouse counts for local logins and for a person at a login screen, but not
/// for remote logins.
#[test]
fn keys_count_for_local_logins_and_greeter() {
    let local_login = Login {
        origin: String::new(),
        ..login("olga", "tty2", 1000)
    };
    let mut fixture = SignsFixture::with_logins(vec![local_login]);
    assert_eq!(
        fixture.verdict_at(90_000).confidence,
        90,
        "nobody can tell how long she is idle"
    );
    fixture.input_activity = Evidence::Known(InputActivity {
        watched_since: Micros::from_secs(1000),
        last_used: None,
    });
    assert!(matches!(
        fixture.verdict_at(90_000).verdict,
        OwnerVerdict::Uncertain { .. }
    ));
    fixture.input_activity = Evidence::Known(InputActivity {
        watched_since: Micros::from_secs(1000),
        last_used: Some(Micros::from_secs(89_990)),
    });
    assert!(matches!(
        fixture.verdict_at(90_000).verdict,
        OwnerVerdict::Present { .. }
    ));
    fixture.login_records = LoginRecords::Logins(Vec::new());
    assert!(matches!(
        fixture.verdict_at(90_000).verdict,
        OwnerVerdict::Present { .. }
    ));
    assert!(matches!(
        fixture.verdict_at(89_990 + 300).verdict,
        OwnerVerdict::Absent { .. }
    ));
    // The input cannot come from a user who is logged in over the network.
    fixture.login_records = LoginRecords::Logins(vec![login("alice", "pts/3", 1000)]);
    fixture
        .terminal_input
        .insert("pts/3".into(), Micros::from_secs(1000));
    assert!(matches!(
        fixture.verdict_at(90_000).verdict,
        OwnerVerdict::Uncertain { .. }
    ));
}

/// High external load means a possibly present owner until the load is low again.
#[test]
fn external_load_is_maybe_until_low_again() {
    let mut fixture = SignsFixture::with_logins(Vec::new());
    let mut detector = OwnerDetector::default();
    for (cores, is_maybe) in [
        (0.4, false),
        (0.6, true),
        (0.3, true),
        (0.2, false),
        (0.4, false),
    ] {
        fixture.external_load = Evidence::Known(cores);
        let assessment = fixture.verdict_with(&mut detector, 10);
        assert_eq!(
            matches!(assessment.verdict, OwnerVerdict::Uncertain { .. }),
            is_maybe,
            "{cores}: {assessment:?}"
        );
    }
    fixture.external_load = Evidence::Known(1.4);
    assert_eq!(
        fixture.verdict_at(1).reason,
        "other programs use about 1.5 processors"
    );
}

/// Until it expires, an owner's override has priority over the logins.
#[test]
fn override_beats_all_signs_until_it_expires() {
    let mut fixture = SignsFixture::with_logins(vec![login("olga", "pts/3", 1000)]);
    fixture.overrides = vec![presence_override(5, "olga", Presence::Away, 2000, 3000)];
    let away_assessment = fixture.verdict_at(2500);
    assert!(
        matches!(away_assessment.verdict, OwnerVerdict::Absent { .. }),
        "{away_assessment:?}"
    );
    assert_eq!(
        (away_assessment.confidence, away_assessment.reason.as_str()),
        (100, "olga declared \"away\", until 00:50:00 UTC")
    );
    assert!(
        matches!(
            fixture.verdict_at(3000).verdict,
            OwnerVerdict::Present { .. }
        ),
        "its time is over"
    );
    fixture = SignsFixture::with_logins(Vec::new());
    fixture.overrides = vec![presence_override(5, "olga", Presence::Here, 2000, 3000)];
    let here_assessment = fixture.verdict_at(2500);
    assert_eq!(here_assessment.confidence, 100);
    assert!(
        matches!(
            here_assessment.verdict,
            OwnerVerdict::Present {
                since: Micros(2_000_000_000),
                ..
            }
        ),
        "{here_assessment:?}"
    );
    assert!(matches!(
        fixture.verdict_at(3000).verdict,
        OwnerVerdict::Absent { .. }
    ));
}

/// An override ends with a login or logout, unless it was set with a duration.
#[test]
fn override_ends_with_login_or_logout() {
    let mut fixture = SignsFixture::with_logins(vec![login("olga", "pts/3", 1000)]);
    fixture.overrides = vec![presence_override(5, "olga", Presence::Away, 2000, 9000)];
    let mut detector = OwnerDetector::default();
    assert!(matches!(
        fixture.verdict_with(&mut detector, 2100).verdict,
        OwnerVerdict::Absent { .. }
    ));
    fixture.login_records = LoginRecords::Logins(vec![
        login("olga", "pts/3", 1000),
        login("olga", "pts/4", 2200),
    ]);
    assert!(matches!(
        fixture.verdict_with(&mut detector, 2201).verdict,
        OwnerVerdict::Present { .. }
    ));
    let mut detector = OwnerDetector::default();
    fixture.login_records = LoginRecords::Logins(vec![login("olga", "pts/3", 1000)]);
    fixture.overrides = vec![presence_override(5, "olga", Presence::Here, 2000, 9000)];
    assert!(matches!(
        fixture.verdict_with(&mut detector, 2100).verdict,
        OwnerVerdict::Present { .. }
    ));
    fixture.login_records = LoginRecords::Logins(Vec::new());
    assert!(matches!(
        fixture.verdict_with(&mut detector, 2200).verdict,
        OwnerVerdict::Absent { .. }
    ));
    // An override that was set with `--for` does not end with a login or logout.
    if let Some(presence) = &mut fixture.overrides[0].owner_override.presence {
        presence.ends_with_visit = false;
    }
    assert!(matches!(
        fixture.verdict_with(&mut detector, 2300).verdict,
        OwnerVerdict::Present { .. }
    ));
}

/// The override "away" hides only the user's own logins, unless the administrator has named the
/// user as an owner.
#[test]
fn away_hides_own_logins_unless_named_owner() {
    let mut fixture = SignsFixture::with_logins(vec![
        login("olga", "pts/3", 1000),
        login("bob", "pts/4", 1000),
    ]);
    fixture.overrides = vec![presence_override(5, "olga", Presence::Away, 2000, 9000)];
    let assessment = fixture.verdict_at(2100);
    assert!(
        assessment.reason.starts_with("bob is logged in"),
        "{assessment:?}"
    );
    fixture.owners = Some(vec!["olga".into()]);
    assert!(matches!(
        fixture.verdict_at(2100).verdict,
        OwnerVerdict::Absent { .. }
    ));
    fixture.owners = Some(vec!["bob".into()]);
    assert!(
        matches!(
            fixture.verdict_at(2100).verdict,
            OwnerVerdict::Present { .. }
        ),
        "olga's word does not count"
    );
    fixture.overrides = vec![presence_override(0, "root", Presence::Away, 2000, 9000)];
    assert!(
        matches!(
            fixture.verdict_at(2100).verdict,
            OwnerVerdict::Absent { .. }
        ),
        "root's always does"
    );
}

#[test]
fn every_source_is_described() {
    let assessment = SignsFixture::with_logins(vec![login("olga", "pts/3", 1000)]).verdict_at(2000);
    let names: Vec<&str> = assessment
        .sources
        .iter()
        .map(|(name, _)| name.as_str())
        .collect();
    assert_eq!(
        names,
        [
            "logins",
            "sessions",
            "terminals",
            "screens",
            "keyboard and mouse",
            "other programs",
            "owner's override"
        ]
    );
    assert!(
        assessment
            .sources
            .iter()
            .all(|(_, description)| !description.is_empty())
    );
}

fn presence_rank(verdict: &OwnerVerdict) -> u8 {
    match verdict {
        OwnerVerdict::Absent { .. } => 0,
        OwnerVerdict::Uncertain { .. } => 1,
        OwnerVerdict::Present { .. } => 2,
    }
}

fn any_signs() -> impl Strategy<Value = SignsFixture> {
    let visit = (
        0_u8..4,
        0_u64..5000,
        prop::option::of(0_u64..5000),
        any::<bool>(),
    );
    let visits = prop::collection::vec(visit, 0..4);
    let any_key_input = prop::option::of((0_u64..5000, prop::option::of(0_u64..5000)));
    let any_override = prop::option::of((
        any::<bool>(),
        0_u64..5000,
        0_u64..9000,
        any::<bool>(),
        0_u32..3,
    ));
    let any_session = prop::option::of((
        0_u64..5000,
        prop_oneof![
            Just(ScreenUse::Unknown),
            Just(ScreenUse::InUse),
            (0_u64..30_000).prop_map(|at| ScreenUse::IdleSince(Micros::from_secs(at)))
        ],
    ));
    let fixture_parts = (
        visits,
        any_key_input,
        prop::option::of(0.0_f32..4.0),
        any_override,
        0_u8..3,
        any_session,
    );
    fixture_parts.prop_map(
        |(visits, any_key_input, external_processors, any_override, record_kind, any_session)| {
            let mut fixture = SignsFixture::with_logins(Vec::new());
            let mut logins = Vec::new();
            for (user, at, input_at_s, is_local) in visits {
                let mut new_entry =
                    login(&format!("u{user}"), &format!("pts/{}", logins.len()), at);
                if is_local {
                    new_entry.origin.clear();
                }
                fixture
                    .terminal_input
                    .extend(input_at_s.map(|t| (new_entry.terminal.clone(), Micros::from_secs(t))));
                logins.push(new_entry);
            }
            fixture.login_records = match record_kind {
                0 => LoginRecords::Missing,
                1 => LoginRecords::Unreadable("no".into()),
                _ => LoginRecords::Logins(logins),
            };
            if let Some((at, reported_use)) = any_session {
                fixture.sessions = Evidence::Known(vec![Session {
                    screen_use: reported_use,
                    ..screen_session("u9", at)
                }]);
            }
            if let Some((watched_since_s, used_at)) = any_key_input {
                let used_at = used_at.map(Micros::from_secs);
                fixture.input_activity = Evidence::Known(InputActivity {
                    watched_since: Micros::from_secs(watched_since_s),
                    last_used: used_at,
                });
            }
            if let Some(cores) = external_processors {
                fixture.external_load = Evidence::Known(cores);
            }
            if let Some((is_here, at, duration_s, visit, uid)) = any_override {
                let state = if is_here {
                    Presence::Here
                } else {
                    Presence::Away
                };
                let mut new_entry =
                    presence_override(uid, &format!("u{uid}"), state, at, at + duration_s);
                if let Some(presence) = &mut new_entry.owner_override.presence {
                    presence.ends_with_visit = visit;
                }
                fixture.overrides = vec![new_entry];
            }
            fixture
        },
    )
}

proptest! {
    /// Every verdict has a reason, a confidence of at most 100 %, and no time in the future.
    #[test]
    fn verdicts_are_well_formed(fixture in any_signs(), now in 5000_u64..20_000) {
        let assessment = fixture.verdict_at(now);
        prop_assert!(assessment.confidence <= 100 && !assessment.reason.is_empty() && assessment.reason.lines().count() == 1);
        let now = Micros::from_secs(now);
        match assessment.verdict {
            OwnerVerdict::Present { since, detected_at } => prop_assert!(since <= now && detected_at <= now),
            OwnerVerdict::Uncertain { since } => prop_assert!(since <= now),
            OwnerVerdict::Absent { since } => prop_assert!(since.is_none()),
        }
    }

    /// An additional login never changes the verdict towards absent.
    #[test]
    fn additional_login_never_lowers_verdict(mut fixture in any_signs(), now in 5000_u64..20_000) {
        fixture.overrides.clear();
        fixture.login_records = match fixture.login_records {
            LoginRecords::Logins(logins) => LoginRecords::Logins(logins),
            _ => LoginRecords::Logins(Vec::new()),
        };
        // The keyboard is not observed here: input of a person at the login screen would be
        // attributed to the added login.
        fixture.input_activity = Evidence::Unavailable("not read".into());
        let previous_rank = presence_rank(&fixture.verdict_at(now).verdict);
        if let LoginRecords::Logins(logins) = &mut fixture.login_records {
            logins.push(login("zoe", "pts/9", 4000));
        }
        prop_assert!(presence_rank(&fixture.verdict_at(now).verdict) >= previous_rank);
    }

    /// Without new signs the verdict never changes towards present.
    #[test]
    fn time_alone_never_raises_verdict(fixture in any_signs(), now in 9000_u64..20_000, additional_s in 0_u64..20_000) {
        let mut fixture = fixture;
        fixture.overrides.clear();
        prop_assert!(presence_rank(&fixture.verdict_at(now + additional_s).verdict) <= presence_rank(&fixture.verdict_at(now).verdict));
    }

    #[test]
    fn equal_signs_give_equal_verdicts(fixture in any_signs(), now in 5000_u64..20_000) {
        let mut detector = OwnerDetector::default();
        let first_assessment = fixture.verdict_with(&mut detector, now);
        prop_assert_eq!(fixture.verdict_with(&mut detector, now), first_assessment);
    }
}

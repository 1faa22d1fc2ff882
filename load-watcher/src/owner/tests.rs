//! Unit tests and properties of the owner verdict.

use super::*;
use crate::policy::Policy;
use proptest::prelude::*;

const IDLE_AFTER: Micros = Micros::from_secs(15 * 60);

fn login(user: &str, line: &str, at: u64) -> Login {
    Login {
        user: user.into(),
        line: line.into(),
        from: "h9".into(),
        at: Micros::from_secs(at),
    }
}

/// The signs of one test case.
#[derive(Debug)]
struct Scene {
    records: LoginRecords,
    sessions: Evidence<Vec<Session>>,
    logind_error: Option<String>,
    terminal_input: BTreeMap<String, Micros>,
    input: Evidence<InputActivity>,
    external_load: Evidence<f32>,
    overrides: Vec<UserOverride>,
    owners: Option<Vec<String>>,
}

impl Scene {
    fn with(logins: Vec<Login>) -> Scene {
        let missing = || "not looked at".to_string();
        Scene {
            records: LoginRecords::Logins(logins),
            sessions: Evidence::Unavailable(missing()),
            logind_error: Some(missing()),
            terminal_input: BTreeMap::new(),
            input: Evidence::Unavailable(missing()),
            external_load: Evidence::Unavailable(missing()),
            overrides: Vec::new(),
            owners: None,
        }
    }

    fn verdict_with(&self, detector: &mut OwnerDetector, seconds: u64) -> OwnerAssessment {
        let signs = OwnerSigns {
            records_path: Path::new("/x/utmp"),
            records: &self.records,
            sessions: &self.sessions,
            logind_error: self.logind_error.as_deref(),
            terminal_input: &self.terminal_input,
            input: &self.input,
            external_load: &self.external_load,
            overrides: &self.overrides,
            owners: self.owners.as_deref(),
            idle_after: IDLE_AFTER,
        };
        detector.verdict(Micros::from_secs(seconds), &signs)
    }

    fn verdict_at(&self, seconds: u64) -> OwnerAssessment {
        self.verdict_with(&mut OwnerDetector::default(), seconds)
    }
}

fn presence_override(uid: u32, user: &str, state: Presence, at: u64, until: u64) -> UserOverride {
    let said = DeclaredPresence {
        state,
        at: Micros::from_secs(at),
        until: Micros::from_secs(until),
        ends_with_visit: true,
    };
    UserOverride {
        uid,
        user: user.into(),
        owner_override: OwnerOverride {
            presence: Some(said),
            policy: Policy::default(),
        },
    }
}

/// The verdict contains the start of a visit while the visit lasts, and its end afterwards.
#[test]
fn verdict_keeps_start_and_end_of_visit() {
    let mut sense = OwnerDetector::default();
    let mut at = |now: u64, logins: Vec<Login>| {
        let sensed = Scene::with(logins).verdict_with(&mut sense, now);
        (sensed.verdict, sensed.reason)
    };
    assert_eq!(
        at(1, Vec::new()),
        (
            OwnerVerdict::Absent { since: None },
            "nobody is logged in".into()
        )
    );
    let alice = login("alice", "pts/3", 100_000);
    let (first, why) = at(100_001, vec![alice.clone()]);
    let present = OwnerVerdict::Present {
        since: Micros::from_secs(100_000),
        detected_at: Micros::from_secs(100_001),
    };
    assert_eq!(first, present);
    assert_eq!(
        why,
        "alice is logged in on pts/3 from h9 since 03:46:40 UTC"
    );
    let (second, why) = at(100_050, vec![alice, login("bob", "pts/4", 100_049)]);
    assert_eq!(second, present);
    assert!(why.ends_with(", and 1 more"));
    assert_eq!(
        at(100_060, Vec::new()).0,
        OwnerVerdict::Absent {
            since: Some(Micros::from_secs(100_060))
        }
    );
    assert_eq!(
        at(100_070, Vec::new()).0,
        OwnerVerdict::Absent {
            since: Some(Micros::from_secs(100_060))
        }
    );
}

/// Without login records the owner counts as absent, and the reason mentions the missing records;
/// with sessions the confidence is higher.
#[test]
fn missing_login_records_mean_absent_with_reason() {
    let sensed = Scene {
        records: LoginRecords::Missing,
        ..Scene::with(Vec::new())
    }
    .verdict_at(1);
    assert_eq!(sensed.verdict, OwnerVerdict::Absent { since: None });
    assert_eq!(sensed.reason, "nobody is logged in: /x/utmp does not exist");
    let denied = LoginRecords::Unreadable("permission denied".into());
    let sensed = Scene {
        records: denied,
        ..Scene::with(Vec::new())
    }
    .verdict_at(1);
    assert_eq!(
        sensed.reason,
        "logins are unknown: /x/utmp cannot be read: permission denied"
    );
    assert!(sensed.confidence <= 50);
    // If systemd lists sessions, login records are not needed.
    let sessions = Evidence::Known(Vec::new());
    let sensed = Scene {
        records: LoginRecords::Missing,
        sessions,
        ..Scene::with(Vec::new())
    }
    .verdict_at(1);
    assert_eq!(
        (sensed.reason.as_str(), sensed.confidence),
        ("nobody is logged in", 90)
    );
}

fn screen_session(user: &str, at: u64) -> Session {
    let login = Login {
        from: String::new(),
        ..login(user, "tty2", at)
    };
    Session {
        login,
        remote: false,
        graphical: true,
        screen_use: ScreenUse::Unknown,
    }
}

/// For a login at a screen, input of keyboard and mouse counts, and input of its terminal does not.
#[test]
fn screen_logins_ignore_terminal_input() {
    let mut scene = Scene {
        sessions: Evidence::Known(vec![screen_session("olga", 50)]),
        ..Scene::with(Vec::new())
    };
    scene
        .terminal_input
        .insert("tty2".into(), Micros::from_secs(50));
    assert!(
        matches!(
            scene.verdict_at(90_000).verdict,
            OwnerVerdict::Present { .. }
        ),
        "nobody can tell whether she is idle"
    );
    scene.input = Evidence::Known(InputActivity {
        watched_since: Micros::from_secs(60),
        last_used: None,
    });
    assert!(matches!(
        scene.verdict_at(90_000).verdict,
        OwnerVerdict::Maybe { .. }
    ));
    // The same login, known only from a login record as display managers write it.
    for (line, from) in [("tty2", "tty2"), (":0", ":0"), ("tty2", ":0")] {
        let mut scene = Scene::with(vec![Login {
            from: from.into(),
            ..login("olga", line, 50)
        }]);
        scene
            .terminal_input
            .insert(line.into(), Micros::from_secs(50));
        assert!(
            matches!(
                scene.verdict_at(90_000).verdict,
                OwnerVerdict::Present { .. }
            ),
            "{line} {from}"
        );
        scene.input = Evidence::Known(InputActivity {
            watched_since: Micros::from_secs(60),
            last_used: Some(Micros::from_secs(89_000)),
        });
        assert!(
            matches!(scene.verdict_at(91_000).verdict, OwnerVerdict::Maybe { .. }),
            "{line} {from}"
        );
    }
}

/// Returns a scene in which Olga is logged in at a screen whose desktop reports this use. No
/// interrupts of keyboard and mouse can be observed.
fn scene_with_desktop(idle: ScreenUse) -> Scene {
    let session = Session {
        screen_use: idle,
        ..screen_session("olga", 50)
    };
    Scene {
        sessions: Evidence::Known(vec![session]),
        logind_error: None,
        ..Scene::with(Vec::new())
    }
}

/// If a desktop reports an idle screen, its user is possibly present since the reported time.
#[test]
fn idle_desktop_reports_start_of_idle_time() {
    let mut sense = OwnerDetector::default();
    let scene = scene_with_desktop(ScreenUse::IdleSince(Micros::from_secs(80_000)));
    assert!(matches!(
        scene.verdict_with(&mut sense, 80_000 + 899).verdict,
        OwnerVerdict::Present { .. }
    ));
    let idle = scene.verdict_with(&mut sense, 80_000 + 900);
    assert_eq!(
        idle.verdict,
        OwnerVerdict::Maybe {
            since: Micros::from_secs(80_000)
        }
    );
    assert!(
        idle.sources
            .contains(&("screens", "tty2 without input 900 s".into())),
        "{:?}",
        idle.sources
    );
    let back = scene_with_desktop(ScreenUse::InUse).verdict_with(&mut sense, 90_000);
    assert!(
        matches!(back.verdict, OwnerVerdict::Present { .. }),
        "{back:?}"
    );
    // The login record of this login names the display; record and session describe one login.
    let record = Login {
        from: ":0".into(),
        ..login("olga", ":0", 50)
    };
    let scene = Scene {
        records: LoginRecords::Logins(vec![record]),
        ..scene
    };
    assert!(matches!(
        scene.verdict_at(90_000).verdict,
        OwnerVerdict::Maybe { .. }
    ));
}

/// A screen that is reported as in use counts as input, unless observed keyboard interrupts
/// contradict.
#[test]
fn observed_keys_override_screen_in_use() {
    let mut scene = scene_with_desktop(ScreenUse::InUse);
    let keys = |used| {
        Evidence::Known(InputActivity {
            watched_since: Micros::from_secs(60),
            last_used: used,
        })
    };
    scene.input = keys(None);
    assert!(
        matches!(
            scene.verdict_at(90_000).verdict,
            OwnerVerdict::Present { .. }
        ),
        "her keyboard may be another one"
    );
    scene.input = keys(Some(Micros::from_secs(70_000)));
    assert!(
        matches!(scene.verdict_at(90_000).verdict, OwnerVerdict::Maybe { .. }),
        "it is this one, and her desktop is never idle"
    );
}

/// A session without a login record is sufficient for the verdict "present".
#[test]
fn session_without_record_counts_as_present() {
    let desk = screen_session("olga", 50);
    let scene = Scene {
        sessions: Evidence::Known(vec![desk]),
        ..Scene::with(Vec::new())
    };
    let sensed = scene.verdict_at(60);
    assert!(
        matches!(sensed.verdict, OwnerVerdict::Present { .. }),
        "{sensed:?}"
    );
    assert_eq!(
        sensed.reason,
        "olga is logged in on tty2 since 00:00:50 UTC"
    );
}

/// A login without input for a quarter of an hour means a possibly present owner; the next input
/// means a present owner.
#[test]
fn idle_login_is_maybe_until_first_key() {
    let mut scene = Scene::with(vec![login("alice", "pts/3", 1000)]);
    scene
        .terminal_input
        .insert("pts/3".into(), Micros::from_secs(2000));
    let mut sense = OwnerDetector::default();
    assert!(matches!(
        scene.verdict_with(&mut sense, 2000 + 899).verdict,
        OwnerVerdict::Present { .. }
    ));
    let idle = scene.verdict_with(&mut sense, 2000 + 900);
    assert_eq!(
        idle.verdict,
        OwnerVerdict::Maybe {
            since: Micros::from_secs(2000)
        }
    );
    assert_eq!(
        idle.reason,
        "alice is logged in on pts/3 from h9, without input since 00:33:20 UTC"
    );
    assert!(
        scene.verdict_with(&mut sense, 2000 + 20_000).confidence < idle.confidence,
        "it gets less likely"
    );
    scene
        .terminal_input
        .insert("pts/3".into(), Micros::from_secs(30_000));
    let back = scene.verdict_with(&mut sense, 30_001);
    let (since, seen) = (Micros::from_secs(1000), Micros::from_secs(30_001));
    assert_eq!(
        back.verdict,
        OwnerVerdict::Present {
            since,
            detected_at: seen
        }
    );
    assert_eq!(back.confidence, 99);
}

/// Input of keyboard and mouse counts for local logins and for a person at a login screen, but not
/// for remote logins.
#[test]
fn keys_count_for_local_logins_and_greeter() {
    let local = Login {
        from: String::new(),
        ..login("olga", "tty2", 1000)
    };
    let mut scene = Scene::with(vec![local]);
    assert_eq!(
        scene.verdict_at(90_000).confidence,
        90,
        "nobody can tell how long she is idle"
    );
    scene.input = Evidence::Known(InputActivity {
        watched_since: Micros::from_secs(1000),
        last_used: None,
    });
    assert!(matches!(
        scene.verdict_at(90_000).verdict,
        OwnerVerdict::Maybe { .. }
    ));
    scene.input = Evidence::Known(InputActivity {
        watched_since: Micros::from_secs(1000),
        last_used: Some(Micros::from_secs(89_990)),
    });
    assert!(matches!(
        scene.verdict_at(90_000).verdict,
        OwnerVerdict::Present { .. }
    ));
    scene.records = LoginRecords::Logins(Vec::new());
    assert!(matches!(
        scene.verdict_at(90_000).verdict,
        OwnerVerdict::Present { .. }
    ));
    assert!(matches!(
        scene.verdict_at(89_990 + 300).verdict,
        OwnerVerdict::Absent { .. }
    ));
    // A user who is logged in over the network does not use this keyboard.
    scene.records = LoginRecords::Logins(vec![login("alice", "pts/3", 1000)]);
    scene
        .terminal_input
        .insert("pts/3".into(), Micros::from_secs(1000));
    assert!(matches!(
        scene.verdict_at(90_000).verdict,
        OwnerVerdict::Maybe { .. }
    ));
}

/// High external load means a possibly present owner until the load is low again.
#[test]
fn external_load_is_maybe_until_low_again() {
    let mut scene = Scene::with(Vec::new());
    let mut sense = OwnerDetector::default();
    for (cores, maybe) in [
        (0.4, false),
        (0.6, true),
        (0.3, true),
        (0.2, false),
        (0.4, false),
    ] {
        scene.external_load = Evidence::Known(cores);
        let sensed = scene.verdict_with(&mut sense, 10);
        assert_eq!(
            matches!(sensed.verdict, OwnerVerdict::Maybe { .. }),
            maybe,
            "{cores}: {sensed:?}"
        );
    }
    scene.external_load = Evidence::Known(1.4);
    assert_eq!(
        scene.verdict_at(1).reason,
        "programs that are not ours use about 1.5 processors"
    );
}

/// An owner's override has priority over all other signs until it expires.
#[test]
fn override_beats_all_signs_until_it_expires() {
    let mut scene = Scene::with(vec![login("olga", "pts/3", 1000)]);
    scene.overrides = vec![presence_override(5, "olga", Presence::Away, 2000, 3000)];
    let away = scene.verdict_at(2500);
    assert!(
        matches!(away.verdict, OwnerVerdict::Absent { .. }),
        "{away:?}"
    );
    assert_eq!(
        (away.confidence, away.reason.as_str()),
        (100, "olga said \"away\", until 00:50:00 UTC")
    );
    assert!(
        matches!(scene.verdict_at(3000).verdict, OwnerVerdict::Present { .. }),
        "its time is over"
    );
    scene = Scene::with(Vec::new());
    scene.overrides = vec![presence_override(5, "olga", Presence::Here, 2000, 3000)];
    let here = scene.verdict_at(2500);
    assert_eq!(here.confidence, 100);
    assert!(
        matches!(
            here.verdict,
            OwnerVerdict::Present {
                since: Micros(2_000_000_000),
                ..
            }
        ),
        "{here:?}"
    );
    assert!(matches!(
        scene.verdict_at(3000).verdict,
        OwnerVerdict::Absent { .. }
    ));
}

/// An override ends with the next login or logout, unless the user set a duration.
#[test]
fn override_ends_with_login_or_logout() {
    let mut scene = Scene::with(vec![login("olga", "pts/3", 1000)]);
    scene.overrides = vec![presence_override(5, "olga", Presence::Away, 2000, 9000)];
    let mut sense = OwnerDetector::default();
    assert!(matches!(
        scene.verdict_with(&mut sense, 2100).verdict,
        OwnerVerdict::Absent { .. }
    ));
    scene.records = LoginRecords::Logins(vec![
        login("olga", "pts/3", 1000),
        login("olga", "pts/4", 2200),
    ]);
    assert!(matches!(
        scene.verdict_with(&mut sense, 2201).verdict,
        OwnerVerdict::Present { .. }
    ));
    let mut sense = OwnerDetector::default();
    scene.records = LoginRecords::Logins(vec![login("olga", "pts/3", 1000)]);
    scene.overrides = vec![presence_override(5, "olga", Presence::Here, 2000, 9000)];
    assert!(matches!(
        scene.verdict_with(&mut sense, 2100).verdict,
        OwnerVerdict::Present { .. }
    ));
    scene.records = LoginRecords::Logins(Vec::new());
    assert!(matches!(
        scene.verdict_with(&mut sense, 2200).verdict,
        OwnerVerdict::Absent { .. }
    ));
    // An override that was set with `--for` does not end with a login or logout.
    if let Some(said) = &mut scene.overrides[0].owner_override.presence {
        said.ends_with_visit = false;
    }
    assert!(matches!(
        scene.verdict_with(&mut sense, 2300).verdict,
        OwnerVerdict::Present { .. }
    ));
}

/// The override "away" hides only the user's own logins, unless the administrator has named the
/// user as an owner.
#[test]
fn away_hides_own_logins_unless_named_owner() {
    let mut scene = Scene::with(vec![
        login("olga", "pts/3", 1000),
        login("bob", "pts/4", 1000),
    ]);
    scene.overrides = vec![presence_override(5, "olga", Presence::Away, 2000, 9000)];
    let sensed = scene.verdict_at(2100);
    assert!(sensed.reason.starts_with("bob is logged in"), "{sensed:?}");
    scene.owners = Some(vec!["olga".into()]);
    assert!(matches!(
        scene.verdict_at(2100).verdict,
        OwnerVerdict::Absent { .. }
    ));
    scene.owners = Some(vec!["bob".into()]);
    assert!(
        matches!(scene.verdict_at(2100).verdict, OwnerVerdict::Present { .. }),
        "olga's word does not count"
    );
    scene.overrides = vec![presence_override(0, "root", Presence::Away, 2000, 9000)];
    assert!(
        matches!(scene.verdict_at(2100).verdict, OwnerVerdict::Absent { .. }),
        "root's always does"
    );
}

#[test]
fn every_source_is_described() {
    let sensed = Scene::with(vec![login("olga", "pts/3", 1000)]).verdict_at(2000);
    let names: Vec<&str> = sensed.sources.iter().map(|(name, _)| *name).collect();
    assert_eq!(
        names,
        [
            "logins",
            "sessions",
            "terminals",
            "screens",
            "keyboard and mouse",
            "other programs",
            "owner's word"
        ]
    );
    assert!(sensed.sources.iter().all(|(_, says)| !says.is_empty()));
}

fn rank(owner: &OwnerVerdict) -> u8 {
    match owner {
        OwnerVerdict::Absent { .. } => 0,
        OwnerVerdict::Maybe { .. } => 1,
        OwnerVerdict::Present { .. } => 2,
    }
}

fn any_scene() -> impl Strategy<Value = Scene> {
    let visit = (
        0_u8..4,
        0_u64..5000,
        prop::option::of(0_u64..5000),
        any::<bool>(),
    );
    let visits = prop::collection::vec(visit, 0..4);
    let keys = prop::option::of((0_u64..5000, prop::option::of(0_u64..5000)));
    let word = prop::option::of((
        any::<bool>(),
        0_u64..5000,
        0_u64..9000,
        any::<bool>(),
        0_u32..3,
    ));
    let desk = prop::option::of((
        0_u64..5000,
        prop_oneof![
            Just(ScreenUse::Unknown),
            Just(ScreenUse::InUse),
            (0_u64..30_000).prop_map(|at| ScreenUse::IdleSince(Micros::from_secs(at)))
        ],
    ));
    let all = (
        visits,
        keys,
        prop::option::of(0.0_f32..4.0),
        word,
        0_u8..3,
        desk,
    );
    all.prop_map(|(visits, keys, foreign, word, kind, desk)| {
        let mut scene = Scene::with(Vec::new());
        let mut logins = Vec::new();
        for (user, at, typed, local) in visits {
            let mut one = login(&format!("u{user}"), &format!("pts/{}", logins.len()), at);
            if local {
                one.from.clear();
            }
            scene
                .terminal_input
                .extend(typed.map(|t| (one.line.clone(), Micros::from_secs(t))));
            logins.push(one);
        }
        scene.records = match kind {
            0 => LoginRecords::Missing,
            1 => LoginRecords::Unreadable("no".into()),
            _ => LoginRecords::Logins(logins),
        };
        if let Some((at, idle)) = desk {
            scene.sessions = Evidence::Known(vec![Session {
                screen_use: idle,
                ..screen_session("u9", at)
            }]);
        }
        if let Some((watched, used)) = keys {
            let used = used.map(Micros::from_secs);
            scene.input = Evidence::Known(InputActivity {
                watched_since: Micros::from_secs(watched),
                last_used: used,
            });
        }
        if let Some(cores) = foreign {
            scene.external_load = Evidence::Known(cores);
        }
        if let Some((here, at, span, visit, uid)) = word {
            let state = if here { Presence::Here } else { Presence::Away };
            let mut one = presence_override(uid, &format!("u{uid}"), state, at, at + span);
            if let Some(said) = &mut one.owner_override.presence {
                said.ends_with_visit = visit;
            }
            scene.overrides = vec![one];
        }
        scene
    })
}

proptest! {
    /// Every verdict has a reason, a confidence of at most 100 %, and no time in the future.
    #[test]
    fn verdicts_are_well_formed(scene in any_scene(), now in 5000_u64..20_000) {
        let sensed = scene.verdict_at(now);
        prop_assert!(sensed.confidence <= 100 && !sensed.reason.is_empty() && sensed.reason.lines().count() == 1);
        let now = Micros::from_secs(now);
        match sensed.verdict {
            OwnerVerdict::Present { since, detected_at: seen } => prop_assert!(since <= now && seen <= now),
            OwnerVerdict::Maybe { since } => prop_assert!(since <= now),
            OwnerVerdict::Absent { since } => prop_assert!(since.is_none()),
        }
    }

    /// An additional login never changes the verdict towards absent.
    #[test]
    fn additional_login_never_lowers_verdict(mut scene in any_scene(), now in 5000_u64..20_000) {
        scene.overrides.clear();
        scene.records = match scene.records {
            LoginRecords::Logins(logins) => LoginRecords::Logins(logins),
            _ => LoginRecords::Logins(Vec::new()),
        };
        // With a source for the keyboard, input of a person at the login screen would be attributed
        // to the user who is logged in.
        scene.input = Evidence::Unavailable("not looked at".into());
        let before = rank(&scene.verdict_at(now).verdict);
        if let LoginRecords::Logins(logins) = &mut scene.records {
            logins.push(login("zoe", "pts/9", 4000));
        }
        prop_assert!(rank(&scene.verdict_at(now).verdict) >= before);
    }

    /// Without new signs the verdict never changes towards present.
    #[test]
    fn time_alone_never_raises_verdict(scene in any_scene(), now in 9000_u64..20_000, more in 0_u64..20_000) {
        let mut scene = scene;
        scene.overrides.clear();
        prop_assert!(rank(&scene.verdict_at(now + more).verdict) <= rank(&scene.verdict_at(now).verdict));
    }

    #[test]
    fn equal_signs_give_equal_verdicts(scene in any_scene(), now in 5000_u64..20_000) {
        let mut sense = OwnerDetector::default();
        let first = scene.verdict_with(&mut sense, now);
        prop_assert_eq!(scene.verdict_with(&mut sense, now), first);
    }
}

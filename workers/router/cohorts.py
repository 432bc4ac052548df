def form_cohorts(lengths, groups, current):
    ids = sorted(lengths, key=lambda i: (lengths[i], i))
    return {s: min(groups - 1, i * groups // len(ids)) for i, s in enumerate(ids)}


random_cohorts = form_cohorts

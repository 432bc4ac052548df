class CircuitBreaker:
    is_closed = True

    def observe(self, *a):
        pass

    def allows(self, now):
        return True


def breakeven_rate(times, n):
    return 0.0
